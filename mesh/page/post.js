// A call that changes something: { message } when it is done, { error } with its hint when it is not.

export async function post(path, body) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    return await answer.json();
  } catch (fault) {
    return { error: { message: `the controller did not answer: ${fault.message}` } };
  }
}
