/* The search of the site finds sections that have every word of a query. A pasted error has values besides, which no page
   has. Here a query that is like an error of the page Troubleshooting becomes the words of that error. */

const wordsOf = (text) => text.toLowerCase().match(/[a-z_]+/g) ?? [];

/** `query`, or the words of the one of `texts` that it is like: most of the phrases around its values ("…") are in it. */
function withoutValues(query, texts) {
  const given = ` ${wordsOf(query).join(" ")} `;
  let best = [];
  for (const text of texts) {
    const phrases = text.split("…").map(wordsOf).filter((words) => words.length);
    const found = phrases.filter((words) => given.includes(` ${words.join(" ")} `)).flat();
    if (found.length > best.length && found.length >= 0.6 * phrases.flat().length) best = found;
  }
  return best.length > 1 ? best.join(" ") : query;
}

if (typeof module === "undefined") {
  // The site's own script tells a worker all sections (type 0), then each query (type 2).
  let texts = [];
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...rest) {
    if (message?.type === 0) {
      const errors = message.data.items.filter((item) => item.location.includes("troubleshooting/#"));
      texts = errors.flatMap((item) => [...item.title.matchAll(/<code>(.*?)<\/code>/g)].map((match) => match[1]));
    }
    if (message?.type === 2 && typeof message.data?.input === "string") {
      message = { ...message, data: { ...message.data, input: withoutValues(message.data.input, texts) } };
    }
    return post.call(this, message, ...rest);
  };
} else {
  module.exports = withoutValues;
}
