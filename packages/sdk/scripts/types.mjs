// Writes src/api.ts from the server's openapi.json: every type of the SDK that crosses HTTP, and
// where each operation goes. Names become camelCase, times become Date, base64 becomes bytes.
import { readFileSync, writeFileSync } from 'node:fs';
import openapiTS, { astToString } from 'openapi-typescript';
import ts from 'typescript';

const here = new URL('..', import.meta.url);
const source = process.argv[2] ?? new URL('../../openapi.json', here);
const document = JSON.parse(readFileSync(source, 'utf8'));
const camel = (name) => name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
const routes = {};
const free = new Set();
const structured = new Set();
const base64 = new Set();

/** Whether a value of this schema has keys that are the user's, and stay as they are. */
function isFree(schema) {
  if (schema.anyOf) return schema.anyOf.some(isFree);
  if (schema.$ref) return false;
  if (schema.type === 'object') return !schema.properties;
  return schema.type === 'array' ? !schema.items && !schema.prefixItems : !schema.type;
}

const refersTo = (schema) =>
  Boolean(schema.$ref ?? schema.items?.$ref ?? schema.anyOf?.some(refersTo));

for (const [name, schema] of Object.entries(document.components.schemas)) {
  const properties = {};
  const isInput = /(Request|Input)$/.test(name);
  for (const [key, property] of Object.entries(schema.properties ?? {})) {
    if (isFree(property)) free.add(key);
    if (refersTo(property)) structured.add(key);
    const kinds = property.anyOf ?? [property];
    if (!isInput && kinds.some((kind) => kind.contentEncoding === 'base64')) base64.add(key);
    // Of what a caller gives, a field with a default may be left out; of an answer it is there.
    if (isInput) delete property.default;
    properties[camel(key)] = property;
  }
  if (schema.properties) schema.properties = properties;
  // An answer has every field: the server leaves none out.
  if (!isInput) schema.required = Object.keys(properties).filter((key) => !/^(Chunk|Error)$/.test(name) || schema.required?.includes(key));
  else schema.required = schema.required?.map(camel);
}
for (const [path, verbs] of Object.entries(document.paths)) {
  for (const [verb, operation] of Object.entries(verbs)) {
    routes[operation.operationId] = `${verb.toUpperCase()} ${path}`;
    for (const status of Object.keys(operation.responses)) {
      if (!status.startsWith('2')) delete operation.responses[status];
    }
    for (const parameter of operation.parameters ?? []) {
      if (parameter.in === 'query') parameter.name = camel(parameter.name);
    }
  }
}

const reference = (name) => ts.factory.createTypeReferenceNode(name);
const tree = await openapiTS(document, {
  transform(schema) {
    if (schema.format === 'date-time') return reference('Date');
    if (schema.contentEncoding === 'base64') return reference('Uint8Array');
    return undefined;
  },
});
const list = (names) => JSON.stringify([...names].sort());
const opaque = [...free].filter((name) => !structured.has(name));
writeFileSync(
  new URL('src/api.ts', here),
  `// Made by scripts/types.mjs from openapi.json. Do not edit.
/** Where each operation goes. */
export const routes = ${JSON.stringify(routes, null, 2)} as const;
/** Fields whose keys are the user's own, and are left as they are. */
export const freeForm: readonly string[] = ${list(opaque)};
/** Fields of answers that have bytes as base64. */
export const base64Fields: readonly string[] = ${list(base64)};
${astToString(tree)}`,
);
