// Vercel's AI SDK with its provider for compatible servers: node SCRIPT FEATURE URL MODEL. Throws where anything is wrong.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [feature, url, name] = process.argv.slice(2);
const shoal = createOpenAICompatible({
  name: "shoal", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = shoal(name);
const common = { model, temperature: 0, maxRetries: 0 };
const prompt = "How will the weather be in Paris in the next three days?";
const schema = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal(3) });
const tools = {
  forecast: tool({
    description: "The weather.", inputSchema: schema, execute: async ({ city }) => `In ${city}, the sky is blue.`,
  }),
};
// The first step calls; the second one answers.
const steps = {
  ...common, tools, stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "forecast" } : "none" }),
};

const features = {
  async text() {
    const whole = await generateText({ ...common, prompt: "Hello!" });
    const streamed = streamText({ ...common, prompt: "Hello!" });
    let text = "";
    for await (const piece of streamed.textStream) text += piece;
    assert(whole.text && text === whole.text);
    assert((await streamed.usage).outputTokens === whole.usage.outputTokens && whole.usage.outputTokens > 0);
  },
  async tools() {
    const whole = await generateText({ ...steps, prompt });
    const streamed = streamText({ ...steps, prompt });
    for await (const _ of streamed.textStream);
    for (const made of [whole.steps, await streamed.steps]) {
      assert.equal(made.length, 2);
      assert(JSON.stringify(made[0].toolResults).includes("the sky is blue") && made[1].text);
    }
  },
  async turns() {
    const first = await generateText({ ...steps, messages: [{ role: "user", content: prompt }] });
    const messages = [{ role: "user", content: prompt }, ...first.response.messages, { role: "user", content: "And?" }];
    assert((await generateText({ ...common, tools, toolChoice: "none", messages })).text);
  },
  async objects() {
    assert.equal((await generateObject({ ...common, schema, prompt })).object.days, 3);
    const streamed = streamObject({ ...common, schema, prompt });
    for await (const _ of streamed.partialObjectStream);
    assert.equal((await streamed.object).days, 3);
  },
  async full() {
    const asked = generateText({ ...common, prompt: "so it goes on and on, ".repeat(50000) });
    const error = await asked.then(() => null, (refused) => refused);
    assert(APICallError.isInstance(error) && error.statusCode === 400 && !error.isRetryable, String(error));
    assert(/maximum context length is \d+ tokens/.test(error.message), error.message);
  },
};

await features[feature]();
process.exit(0);
