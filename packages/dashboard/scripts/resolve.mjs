// Lets scripts of ../sdk find their packages in this folder's node_modules, so that the page is
// built after one `npm ci`, here.
import { register } from 'node:module';

const here = new URL('../package.json', import.meta.url).href;
const hook = `export async function resolve(name, context, next) {
  try {
    return await next(name, context);
  } catch (error) {
    if (error.code !== 'ERR_MODULE_NOT_FOUND' || /^[./]/.test(name)) throw error;
    return next(name, { ...context, parentURL: ${JSON.stringify(here)} });
  }
}`;
register(`data:text/javascript,${encodeURIComponent(hook)}`);
