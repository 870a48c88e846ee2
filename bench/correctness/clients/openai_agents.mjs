// Agents of @openai/agents: node SCRIPT FEATURE URL MODEL. Throws where anything is wrong.
import assert from "node:assert";
import OpenAI from "openai";
import { z } from "zod";
import {
  Agent, MemorySession, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool,
} from "@openai/agents";

const [feature, url, model] = process.argv.slice(2);
setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const both = [new OpenAIChatCompletionsModel(client, model), new OpenAIResponsesModel(client, model)];
const QUESTION = "How will the weather be in Paris in the next three days?";
const Forecast = z.object({ city: z.enum(["Paris", "Rome"]), days: z.literal(3) });
const forecast = tool({
  name: "forecast", description: "The weather.", parameters: Forecast,
  execute: async ({ city }) => `In ${city}, the sky is blue.`,
});
const ONE_CALL = { temperature: 0, toolChoice: "required", parallelToolCalls: false };
const results = (made) => made.newItems.filter((item) => item.type === "tool_call_output_item");

const features = {
  async text(model) {
    const agent = new Agent({ name: "A", instructions: "Be brief.", model, modelSettings: { temperature: 0 } });
    const whole = await run(agent, "Hello!");
    const streamed = await run(agent, "Hello!", { stream: true });
    let text = "";
    for await (const piece of streamed.toTextStream()) text += piece;
    await streamed.completed;
    assert(whole.finalOutput && text === whole.finalOutput && streamed.finalOutput === text);
  },
  async tools(model) {
    const agent = new Agent({ name: "A", model, modelSettings: ONE_CALL, tools: [forecast] });
    const whole = await run(agent, QUESTION);
    const streamed = await run(agent, QUESTION, { stream: true });
    for await (const _ of streamed);
    await streamed.completed;
    for (const made of [whole, streamed]) {
      assert.equal(results(made).length, 1);
      assert(JSON.stringify(results(made)[0]).includes("the sky is blue") && made.finalOutput);
    }
  },
  // The director has the model say something before it calls: what is sent back has text and a call in one message.
  async said(model) {
    if (!(model instanceof OpenAIChatCompletionsModel)) return;
    const agent = new Agent({ name: "A", model, tools: [forecast] });
    const made = await run(agent, QUESTION);
    assert.equal(results(made).length, 1);
    assert(made.finalOutput && made.newItems.some((item) => item.type === "message_output_item"));
    assert((await run(agent, [...made.history, { role: "user", content: "And?" }])).finalOutput);
  },
  async turns(model) {
    const agent = new Agent({ name: "A", model, modelSettings: ONE_CALL, tools: [forecast] });
    const session = new MemorySession();
    const first = await run(agent, QUESTION, { session });
    assert((await run(agent, "And then?", { session })).finalOutput);
    assert((await run(agent, [...first.history, { role: "user", content: "And?" }])).finalOutput);
  },
  async output(model) {
    const agent = new Agent({ name: "A", model, modelSettings: { temperature: 0 }, outputType: Forecast });
    assert.equal((await run(agent, QUESTION)).finalOutput.days, 3);
  },
  async full(model) {
    const agent = new Agent({ name: "A", model });
    await assert.rejects(run(agent, "so it goes on and on, ".repeat(50000)), { code: "context_length_exceeded" });
  },
};

for (const each of both) await features[feature](each);
process.exit(0);
