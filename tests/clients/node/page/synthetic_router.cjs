// A made-up router that serves the page and a synthetic cluster, with the paths of the real one.
//   node synthetic_router.cjs [port] [JSON of the cluster's options]
const http = require("node:http");
const { assembledPage } = require("./assembled_page.cjs");
const { SyntheticCluster } = require("./synthetic_cluster.cjs");

class SyntheticRouter {
  constructor(options = {}) {
    this.options = options;
    this.cluster = new SyntheticCluster(options);
    this.key = options.key;
    this.refusal = 0;
    this.streams = new Set();
    this.models = ["demo"];
    // Of the APIs that generate, with their keys.
    this.calls = [];
    this.server = http.createServer((request, response) => this.answer(request, response));
  }

  async start(port = 0) {
    await new Promise((resolve) => this.server.listen(port, "127.0.0.1", resolve));
    this.port = this.server.address().port;
    this.url = `http://127.0.0.1:${this.port}`;
    return this;
  }

  // Ends every stream, as a router does that stops.
  dropStreams() {
    for (const response of this.streams) response.destroy();
  }

  // A router that was started again: it knows nothing of before.
  restart() {
    this.cluster.close();
    this.cluster = new SyntheticCluster(this.options);
    this.dropStreams();
  }

  async close() {
    this.cluster.close();
    this.server.closeAllConnections();
    await new Promise((resolve) => this.server.close(resolve));
  }

  refuse(response, status, message) {
    response.writeHead(status, { "content-type": "application/json" });
    response.end(JSON.stringify({ error: { message } }));
  }

  answer(request, response) {
    const { pathname, searchParams } = new URL(request.url, this.url);
    if (pathname === "/ui" || pathname === "/chat") {
      const { html, policy } = assembledPage(pathname === "/ui" ? "LIVE" : "CHAT");
      response.writeHead(200, { "content-type": "text/html; charset=utf-8", "content-security-policy": policy, "x-frame-options": "DENY" });
      response.end(html);
      return;
    }
    if (this.refusal) return this.refuse(response, this.refusal, "as many viewers watch as the router takes");
    if (/^\/(ui|v1)\//.test(pathname) && this.key && request.headers.authorization !== `Bearer ${this.key}`) return this.refuse(response, 401, "unknown API key");
    const kill = /^\/ui\/workers\/(\d+)\/kill$/.exec(pathname);
    const life = /^\/ui\/requests\/(\d+)$/.exec(pathname);
    if (pathname === "/ui/events") this.events(response, Number(searchParams.get("rate")) || 4);
    else if (life) {
      const found = this.cluster.life(Number(life[1]));
      if (!found) return this.refuse(response, 404, "no such request");
      response.writeHead(200, { "content-type": "application/json" });
      response.end(JSON.stringify(found));
    } else if (kill && request.method === "POST") {
      if (request.headers["x-inflight-ui"] !== "1") return this.refuse(response, 403, "X-Inflight-UI is missing");
      if (!this.cluster.kill(Number(kill[1]) + 1)) return this.refuse(response, 404, "no such worker");
      response.writeHead(204).end();
    } else if (pathname === "/v1/models") {
      response.writeHead(200, { "content-type": "application/json" });
      response.end(JSON.stringify({ object: "list", data: this.models.map((id) => ({ id })) }));
    } else if (pathname.startsWith("/v1/") && request.method === "POST") this.generate(request, response);
    else this.refuse(response, 404, "no such path");
  }

  events(response, rate) {
    response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-store" });
    const watcher = this.cluster.watch();
    // Changes since the last update of this viewer.
    const cluster = this.cluster;
    const changes = watcher.changed;
    this.streams.add(response);
    let [id, skipped] = [0, 0];
    const send = () => {
      for (const number of cluster.changed) for (const stream of this.watchers ?? []) stream.add(number);
      cluster.changed.clear();
      if (response.writableNeedDrain) {
        skipped += 1;
        return;
      }
      const update = watcher.next();
      if (skipped) update.skippedUpdates = skipped;
      skipped = 0;
      response.write(`event: update\nid: ${++id}\ndata: ${JSON.stringify(update)}\n\n`);
    };
    (this.watchers ??= new Set()).add(changes);
    send();
    const timer = setInterval(send, 1000 / rate);
    response.on("close", () => {
      clearInterval(timer);
      this.streams.delete(response);
      this.watchers.delete(changes);
    });
  }

  generate(request, response) {
    let text = "";
    request.on("data", (part) => (text += part));
    request.on("end", () => {
      const body = JSON.parse(text);
      this.calls.push({ body, authorization: request.headers.authorization });
      if (body.model !== "demo") return this.refuse(response, 404, `the model ${body.model} does not exist`);
      response.writeHead(200, { "content-type": "text/event-stream" });
      let tokens = 0;
      const made = this.cluster.arrive({
        requestId: request.headers["x-request-id"], tenant: "playground", promptTokens: 40, outputTokens: body.max_tokens ?? 30,
        onToken: (token, outcome) => {
          if (token !== null) {
            tokens += 1;
            response.write(`data: ${JSON.stringify({ choices: [{ index: 0, delta: { content: token }, text: token }] })}\n\n`);
            return;
          }
          response.write(`data: ${JSON.stringify({ choices: [], usage: { prompt_tokens: 40, completion_tokens: tokens } })}\n\ndata: [DONE]\n\n`);
          response.end();
          this.lastOutcome = outcome;
        },
      });
      // Played requests go first, so that a test with a full queue does not wait.
      this.cluster.queue = [made.number, ...this.cluster.queue.filter((one) => one !== made.number)];
      response.on("close", () => this.cluster.cancel(made.number));
    });
  }
}

module.exports = { SyntheticRouter };

if (require.main === module) {
  const [port, options] = process.argv.slice(2);
  new SyntheticRouter(JSON.parse(options ?? "{}")).start(Number(port ?? 8641)).then(({ url }) => console.log(`${url}/ui`));
}
