// The tool that every session offers, and what it answers. Each call's arguments are kept in `asked`.

import assert from 'node:assert/strict';

export const QUESTION = 'What is the weather in Milton?';
export const RESULT = '{"weather": "foggy"}';
export const ANSWER = 'The weather in Milton is foggy.';

export const name = 'get_weather';
export const description = 'Get the weather of a town';
export const parameters = {
  type: 'object',
  properties: { city: { type: 'string', description: 'Name of the town' } },
  required: ['city'],
};

export const asked = [];

export function getWeather(given) {
  asked.push(given);
  return RESULT;
}

export function checkCalls(numCalls) {
  assert.deepEqual(asked, Array(numCalls).fill({ city: 'Milton' }));
}

// Options of both SDKs: a failed request fails the session instead of being sent again.
export const options = { apiKey: 'none', maxRetries: 0 };
export const url = process.env.QUIPU_URL;
