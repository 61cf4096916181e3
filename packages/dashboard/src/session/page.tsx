export function SessionPage({ id }: { id: string }) {
  return <h1>{id}</h1>;
}
