// What the cache explorer shows. It outlives a look at another page, and is in no URL: a request id is for this tab only.
export const chosen = { colour: "age", showsOrder: false, ...nothing() };

function nothing() {
  return {
    tenant: "",
    engine: "",
    request: "",
    above: [], // the branches that were opened, outermost first: {id, tokens}
    selected: null,
    unfolded: new Set(), // knots whose every branch is drawn
  };
}

/** Forget what belongs to the tenant of a key. */
export const forget = () => Object.assign(chosen, nothing());

/** Show the cache with the path of a request laid over it. */
export function showInCache(requestId) {
  Object.assign(chosen, { request: requestId, above: [], selected: null, tenant: "" });
  location.hash = "#cache";
}
