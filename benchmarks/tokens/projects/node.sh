# A small shop in JavaScript, tested with jest and vitest; TypeScript beside it.
ln -s /opt/kitchen/node/node_modules node_modules
cat > package.json <<'JSON'
{"name": "shop", "version": "1.4.0", "private": true,
 "scripts": {"test": "jest", "build": "tsc --noEmit"}}
JSON
mkdir -p src tests spec
cat > src/cart.js <<'JS'
class Cart {
  constructor() { this.items = []; }
  add(name, price, count = 1) {
    if (price < 0) throw new RangeError(`price of ${name} is below zero`);
    this.items.push({ name, price, count });
    return this;
  }
  total() { return this.items.reduce((sum, i) => sum + i.price * i.count, 0); }
  find(name) { return this.items.find((i) => i.name === name); }
}
module.exports = { Cart };
JS
cat > src/money.js <<'JS'
exports.format = (cents) => `${(cents / 100).toFixed(2)} €`;
exports.parse = (text) => Math.round(parseFloat(text) * 100);
exports.add = (a, b) => a + b;
JS
for n in $(seq 1 14); do
cat > tests/part$n.test.js <<JS
const { Cart } = require("../src/cart");
const money = require("../src/money");
describe("cart part $n", () => {
$(for k in $(seq 1 9); do echo "  test(\"adds $k of article $n\", () => { expect(new Cart().add(\"a\", $k, $n).total()).toBe($((k * n))); });"; done)
  test("formats the sum of part $n", () => { expect(money.format($n * 100)).toBe("$n.00 €"); });
});
JS
cat > spec/part$n.spec.mjs <<JS
import { describe, expect, it } from "vitest";
import { Cart } from "../src/cart.js";
describe("cart part $n", () => {
$(for k in $(seq 1 9); do echo "  it(\"adds $k of article $n\", () => { expect(new Cart().add(\"a\", $k, $n).total()).toBe($((k * n))); });"; done)
});
JS
done
cat > vitest.config.mjs <<'JS'
export default { test: { include: ["spec/**/*.spec.mjs"] }, cacheDir: "/tmp/vite" };
JS
cat > eslint.config.mjs <<'JS'
import js from "/opt/kitchen/node/node_modules/@eslint/js/src/index.js";
export default [js.configs.recommended, { rules: { "no-var": "error", eqeqeq: "error", "prefer-const": "warn", "no-unused-vars": "warn", curly: "error", "func-style": "warn" } }];
JS
cat > break.sh <<'SH'
# Two tests fail, one file cannot be loaded.
sed -i 's/toBe("3.00 €")/toBe("3,00 €")/' tests/part3.test.js
sed -i '0,/toBe(14)/s//toBe(41)/' tests/part7.test.js
echo 'const lost = require("../src/lost");' >> tests/part9.test.js
sed -i '0,/toBe(14)/s//toBe(41)/' spec/part7.spec.mjs
echo 'import "../src/lost.js";' >> spec/part9.spec.mjs
echo 'it("is let down by a promise", async () => { setTimeout(() => { throw new Error("nobody caught me") }, 0); await new Promise((r) => setTimeout(r, 20)); });' >> spec/part2.spec.mjs
SH
