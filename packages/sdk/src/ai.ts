/** The tools of a sandbox for the Vercel AI SDK (`ai`). */
import { jsonSchema, tool, type Tool as AiTool } from 'ai';
import { toBase64 } from './convert.js';
import type { Sandbox } from './sandbox.js';
import type { ToolAnswer, ToolboxOptions } from './tools.js';

/** For `tools` of `generateText` and its like. Aborting the generation stops the command. */
export async function aiTools(
  sandbox: Sandbox,
  options: ToolboxOptions = {},
): Promise<Record<string, AiTool<any, ToolAnswer>>> {
  const tools = await sandbox.tools.with(options).list();
  return Object.fromEntries(
    tools.map(({ name, description, parameters, execute }) => [
      name,
      tool<any, ToolAnswer>({
        description,
        inputSchema: jsonSchema<any>(parameters),
        execute: (args, { abortSignal }) => execute(args, { signal: abortSignal }),
        toModelOutput: ({ output }) => ({
          type: 'content',
          value: [
            { type: 'text', text: output.text },
            ...output.pictures.map(({ data, mime }) => ({
              type: 'image-data' as const,
              data: toBase64(data),
              mediaType: mime,
            })),
          ],
        }),
      }),
    ]),
  );
}
