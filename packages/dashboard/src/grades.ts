/** How far a box is kept from its machine, in words. */
export const GRADES: Record<string, { words: string; about: string; kind: 'good' | 'warning' | 'bad' }> = {
  vm: { words: 'virtual machine', about: 'Each sandbox has a kernel of its own, in a virtual machine.', kind: 'good' },
  gvisor: { words: 'own kernel', about: 'Each sandbox has a kernel of its own, in user space (gVisor).', kind: 'good' },
  ns: { words: 'namespaces', about: 'Sandboxes share the kernel of this machine, each with its own view of files, processes, users and network.', kind: 'good' },
  lsm: { words: 'rules only', about: 'Only rules of the kernel stand between a sandbox and this machine.', kind: 'warning' },
  none: { words: 'none', about: 'Nothing stands between a sandbox and this machine: run nothing that you do not trust.', kind: 'bad' },
};
