// What the cache explorer shows. It outlives a look at another page, and is in no URL: a request id is for this tab only.
export const chosen = {
  tenant: "",
  engine: "",
  colour: "age",
  showsOrder: false,
  request: "",
  above: [], // the branches that were opened, outermost first: {id, tokens}
  selected: null,
  unfolded: new Set(), // knots whose every branch is drawn
};

/** Show the cache with the path of a request laid over it. */
export function showInCache(requestId) {
  Object.assign(chosen, { request: requestId, above: [], selected: null, tenant: "" });
  location.hash = "#cache";
}
