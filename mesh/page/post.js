// A call that changes something: { message } when it is done, { error } with its hint when it is not.

import { headers } from "./session.js";

export async function post(path, body) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
    });
    return await answer.json();
  } catch (fault) {
    return { error: { message: `the controller did not answer: ${fault.message}` } };
  }
}
