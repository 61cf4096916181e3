# Thirty TypeScript files with the mistakes that people make.
ln -s /opt/kitchen/node/node_modules node_modules
mkdir -p src
echo '{"compilerOptions": {"strict": true, "target": "es2022", "module": "nodenext", "moduleResolution": "nodenext", "noEmit": true, "noUnusedLocals": true, "types": []}, "include": ["src"]}' > tsconfig.json
for n in $(seq 1 30); do
cat > src/model$n.ts <<TS
export interface Order$n { id: number; customer: string; lines: Line$n[]; paid?: boolean }
export interface Line$n { article: string; price: number; count: number }
export function total$n(order: Order$n): string {
  const unused = order.id;
  return order.lines.reduce((sum, line) => sum + line.price * line.count, 0);
}
export function first$n(order: Order$n): Line$n {
  return order.lines.find((line) => line.cuont > 0);
}
export const sample$n: Order$n = { id: "$n", customer: "Ada", lines: [] };
export function note$n(text) { return text.trim(); }
TS
done
