// What must hold for every client. Prints what it saw, as JSON.
const text = (result) => result.content.map((part) => part.text ?? '').join('\n');

export async function check({ client, call }) {
  const bash = (command, options) =>
    call({ name: 'bash', arguments: { command, timeout: 60 } }, options);
  const { tools } = await client.listTools();
  const first = text(await bash('echo $((6 * 7)); x=kept'));
  const kept = text(await bash('echo $x; echo data > /workspace/file'));
  const told = [];
  const slow = bash('echo step; until [ -e /workspace/go ]; do sleep 0.05; done', {
    onprogress: ({ message }) => told.push(message),
    resetTimeoutOnProgress: true,
  });
  while (!told.length) await new Promise((go) => setTimeout(go, 20));
  const { resources } = await client.listResources();
  const file = resources.find(({ name }) => name === 'file');
  const { contents } = await client.readResource({ uri: file.uri });
  const other = await call({ name: 'create_box', arguments: {} });
  const box = other._meta['hutch/facts'].box;
  await call({ name: 'write', arguments: { path: '/workspace/mine', content: 'x', box } });
  const apart = await call({ name: 'read', arguments: { path: '/workspace/mine' } });
  await call({ name: 'close_box', arguments: { box } });
  await call({ name: 'write', arguments: { path: '/workspace/go', content: '' } });
  await slow;
  const controller = new AbortController();
  const long = bash('sleep 4321', { signal: controller.signal, onprogress: () => controller.abort() });
  const cancelled = await long.then(() => false, () => true);
  const after = 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; echo; done 2>/dev/null | grep -c "^sleep 4321"';
  let left = '';
  for (let tries = 0; tries < 100 && left !== '0'; tries++) {
    left = text(await bash(after)).trim().split('\n')[0];
  }
  const prompts = (await client.listPrompts()).prompts.map(({ name }) => name);
  const seen = { tools: tools.map(({ name }) => name), first, kept, told, read: contents[0].text,
    apart: apart.isError === true, cancelled, left, prompts };
  console.log(JSON.stringify(seen));
}
