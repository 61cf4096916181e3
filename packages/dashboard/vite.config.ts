import { fileURLToPath } from 'node:url';
import { defineConfig } from 'vite';

const path = (name: string) => fileURLToPath(new URL(name, import.meta.url));

export default defineConfig({
  base: './',
  resolve: { alias: { hutch: path('../sdk/src/index.ts') } },
  // A file inside the page as a data: address would be one that the page's policy has to allow.
  build: {
    outDir: path('../../src/hutch/dashboard/static'),
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 700,
  },
  server: {
    host: '127.0.0.1',
    proxy: {
      '/v1': { target: 'http://127.0.0.1:8080', ws: true },
      '/frame': { target: 'http://127.0.0.1:8080' },
      '/preview': { target: 'http://127.0.0.1:8080' },
    },
  },
});
