export function Administration({ part }: { part: string; rest?: string | undefined }) {
  return <h1>{part}</h1>;
}
