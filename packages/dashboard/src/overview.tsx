export function Overview() {
  return <h1>Sessions</h1>;
}
