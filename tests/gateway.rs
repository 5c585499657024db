//! The whole router in one process: builtin workers, actors, gateway, over real sockets.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use kvc_router::node::{Clock, Node, NodeConfig, reference_text};
use kvc_router::prompt::Api;
use kvc_router::settings::Layers;
use kvc_router::wire::info::KvRole;
use kvc_router::{Router, RouterHandle, Settings};
use serde_json::{Value, json};

#[path = "gateway/apis.rs"]
mod apis;
#[path = "gateway/hint.rs"]
mod hint;
#[path = "gateway/leaving.rs"]
mod leaving;
#[path = "gateway/lifecycle.rs"]
mod lifecycle;
#[path = "gateway/resume.rs"]
mod resume;

const MODEL: &str = "builtin";

struct World {
    url: String,
    router: RouterHandle,
    nodes: Vec<Node>,
}

async fn node(name: &str, role: KvRole) -> Node {
    let cost = Clock { time_scale: 1000.0, ..Clock::default() };
    Node::start(NodeConfig { cost, model: MODEL.into(), ..NodeConfig::new(name, [role]) }).await.unwrap()
}

fn settings(prefill: &[Node], decode: &[Node], more: &[(&str, &str)]) -> Settings {
    let urls = |nodes: &[Node]| nodes.iter().map(Node::url).collect::<Vec<_>>().join(",");
    let mut flags = vec![
        ("http.listen".to_owned(), "127.0.0.1:0".to_owned()),
        ("http.workers".to_owned(), "1".to_owned()),
        ("fleet.prefill".to_owned(), urls(prefill)),
        ("fleet.decode".to_owned(), urls(decode)),
    ];
    flags.extend(more.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
    Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings
}

impl World {
    async fn start(more: &[(&str, &str)]) -> Self {
        let p = vec![node("p0", KvRole::Prefill).await];
        let d = vec![node("d0", KvRole::Decode).await, node("d1", KvRole::Decode).await];
        let router = Router::start(&settings(&p, &d, more)).await.unwrap();
        let serving = router.serve().unwrap();
        let url = format!("http://{}", serving.addrs[0]);
        actix_web::rt::spawn(serving.server);
        assert!(router.turns().all_up(Duration::from_secs(20)).await);
        Self { url, router, nodes: d.into_iter().chain(p).collect() }
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let (status, _, body) = send(Request::get(format!("{}{path}", self.url)), Bytes::new()).await;
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn ask(&self, session: &str, body: &Value, header: Option<&str>) -> (StatusCode, HeaderMap, Value) {
        let mut request =
            Request::post(format!("{}/v1/chat/completions", self.url)).header("x-session-id", session);
        if let Some(name) = header {
            request = request.header(name, "1");
        }
        let (status, headers, body) = send(request, body.to_string().into()).await;
        (status, headers, serde_json::from_slice(&body).unwrap())
    }

    /// Nothing is left of any turn, at the gateway and at every node.
    async fn assert_clean(&self) {
        let leases = || self.nodes.iter().map(|n| n.engine().with(|s, _| s.ledger.leases())).sum::<usize>();
        // The last word on a turn is a message to its session actor, which counts down a moment later.
        loop {
            let inflight: u32 = self.router.turns().workers().await.iter().map(|w| w.inflight).sum();
            if inflight == 0 && leases() == 0 && self.router.turns().inflight() == 0 {
                break;
            }
            tokio::task::yield_now().await;
        }
        self.nodes.iter().for_each(|n| n.audit().unwrap());
    }
}

async fn send(request: http::request::Builder, body: Bytes) -> (StatusCode, HeaderMap, Bytes) {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response = client.request(request.body(Full::new(body)).unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    (head.status, head.headers, body.collect().await.unwrap().to_bytes())
}

fn mode(headers: &HeaderMap) -> &str {
    headers["x-kvc-mode"].to_str().unwrap()
}

fn prompt(words: usize) -> Value {
    let text = (0..words).map(|i| i.to_string()).collect::<Vec<_>>().join(" ");
    json!({"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": text}]})
}

/// Three turns of one conversation: seed, direct, direct, with growing `cached_tokens`, and each answer is the
/// one a single cold worker gives.
#[actix_web::test]
async fn a_conversation_is_seeded_and_then_direct() {
    let world = World::start(&[]).await;
    let mut body = prompt(9000);
    let (mut modes, mut cached) = (Vec::new(), Vec::new());
    for turn in 0..3 {
        let (status, headers, answer) = world.ask("me", &body, None).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(headers["x-kvc-session"], "me");
        modes.push(format!("{} {}", mode(&headers), headers["x-kvc-reason"].to_str().unwrap()));
        cached.push(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        let message = answer["choices"][0]["message"].clone();
        let cold = reference_text(MODEL, Api::Chat, body.to_string().as_bytes()).unwrap();
        assert_eq!(message["content"].as_str().unwrap(), cold);
        let messages = body["messages"].as_array_mut().unwrap();
        messages.push(message);
        messages.push(json!({"role": "user", "content": format!("go on {turn}")}));
    }
    assert_eq!(modes, ["seed full", "direct append", "direct append"]);
    assert!(cached[0] == 0 && cached[0] < cached[1] && cached[1] < cached[2], "{cached:?}");
    world.assert_clean().await;
}

/// `x-kvc-explain` names a record that replays to the same decision.
#[actix_web::test]
async fn a_recorded_decision_replays() {
    let world = World::start(&[("http.explain", "true")]).await;
    let (_, headers, _) = world.ask("me", &prompt(3000), Some("x-kvc-explain")).await;
    let name = headers["x-kvc-explain"].to_str().unwrap();
    let (status, record) = world.get(&format!("/admin/explain/{name}")).await;
    assert_eq!(status, StatusCode::OK);
    let (text, met) = kvc_router::explain::run(&record.to_string()).unwrap();
    assert!(met && text.contains("= seed on"), "{text}");
    assert_eq!(world.get("/admin/explain/nothing").await.0, StatusCode::NOT_FOUND);
    let (_, headers, _) = world.ask("me", &prompt(3000), None).await;
    assert!(!headers.contains_key("x-kvc-explain"));
}

#[actix_web::test]
async fn explain_is_off_unless_enabled() {
    let world = World::start(&[]).await;
    let (_, headers, _) = world.ask("me", &prompt(2000), Some("x-kvc-explain")).await;
    assert!(!headers.contains_key("x-kvc-explain"));
}

/// The worker that holds the session is stopped: the next turn is served elsewhere, without an error.
#[actix_web::test]
async fn a_dead_worker_costs_no_request() {
    let mut world = World::start(&[]).await;
    let mut body = prompt(3000);
    let (_, headers, answer) = world.ask("me", &body, None).await;
    let home = headers["x-kvc-worker"].to_str().unwrap().to_owned();
    let place = world.nodes.iter().position(|n| n.info().name == home).unwrap();
    world.nodes.remove(place).stop().await;
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(answer["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": "still there?"}));
    let (status, headers, answer) = world.ask("me", &body, None).await;
    assert_eq!((status, mode(&headers)), (StatusCode::OK, "reseed"), "{answer}");
    assert_ne!(headers["x-kvc-worker"].to_str().unwrap(), home);
    let cold = reference_text(MODEL, Api::Chat, body.to_string().as_bytes()).unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"].as_str().unwrap(), cold);
    world.assert_clean().await;
}

#[actix_web::test]
async fn state_is_observable() {
    let world = World::start(&[]).await;
    world.ask("me", &prompt(3000), None).await;
    world.assert_clean().await;
    let (_, workers) = world.get("/admin/workers").await;
    assert_eq!(workers["workers"].as_array().unwrap().len(), 3);
    assert!(workers["workers"][0]["health"] == "up" && workers["inflight"] == 0, "{workers}");
    let (_, sessions) = world.get("/admin/sessions").await;
    assert_eq!((&sessions["live"], &sessions["sessions"][0]["session"]), (&json!(1), &json!("me")));
    let (_, models) = world.get("/v1/models").await;
    assert_eq!(models["data"][0]["id"], MODEL);
    assert_eq!(world.get("/ready").await.0, StatusCode::OK);
    world.router.drain();
    assert_eq!(world.get("/ready").await.0, StatusCode::SERVICE_UNAVAILABLE);
}

/// A prompt no worker could ever hold, an unknown model, and no worker at all.
#[actix_web::test]
async fn refusals_are_in_the_apis_format() {
    let world = World::start(&[]).await;
    let (status, headers, answer) = world.ask("big", &prompt(80_000), None).await;
    assert_eq!((status, mode(&headers)), (StatusCode::PAYLOAD_TOO_LARGE, "rejected"));
    assert_eq!(answer["error"]["code"], "prompt_too_large");
    let mut other = prompt(10);
    other["model"] = "gpt".into();
    let (status, _, answer) = world.ask("other", &other, None).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    for node in world.nodes {
        node.stop().await;
    }
    let (status, headers, body) = send(
        Request::post(format!("{}/v1/chat/completions", world.url)).header("x-session-id", "late"),
        prompt(2000).to_string().into(),
    )
    .await;
    let answer: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("no_workers")));
    assert!(headers.contains_key("retry-after") && !answer.to_string().contains("127.0.0.1"), "{answer}");
}

#[actix_web::test]
async fn a_router_without_workers_does_not_start() {
    let error = Router::start(&settings(&[], &[], &[])).await.err().unwrap().to_string();
    assert!(error.contains("fleet.decode"), "{error}");
}

/// A body nested past all reason is a 400, wherever the nesting is, and the process lives on.
#[actix_web::test]
async fn nesting_bombs_are_refused() {
    let world = World::start(&[]).await;
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let bodies = [
        (
            "/v1/chat/completions",
            format!(r#"{{"model":"builtin","messages":[{{"role":"user","content":{deep}}}]}}"#),
        ),
        (
            "/v1/messages",
            format!(
                r#"{{"model":"builtin","max_tokens":3,"messages":[{{"role":"user","content":[{{"type":"tool_result","content":{deep}}}]}}]}}"#
            ),
        ),
        (
            "/v1/responses",
            format!(r#"{{"model":"builtin","input":[{{"type":"function_call_output","output":{deep}}}]}}"#),
        ),
    ];
    for (path, body) in bodies {
        for url in [&world.url, &world.nodes[0].url()] {
            let (status, _, answer) = send(Request::post(format!("{url}{path}")), body.clone().into()).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path}: {}", String::from_utf8_lossy(&answer));
        }
    }
    let parts = "[{\"type\":\"tool_result\",\"content\":".repeat(50_000);
    let body = format!(r#"{{"model":"builtin","messages":[{{"role":"user","content":{parts}"#);
    let (status, _, _) = send(Request::post(format!("{}/v1/chat/completions", world.url)), body.into()).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(world.get("/health").await.0, StatusCode::OK);
}

/// A prefill node configured as a decode worker is down, and says why.
#[actix_web::test]
async fn a_worker_of_the_wrong_role_is_not_used() {
    let nodes = vec![node("p0", KvRole::Prefill).await];
    let router = Router::start(&settings(&[], &nodes, &[])).await.unwrap();
    let state = loop {
        let state = router.turns().workers().await.remove(0);
        if state.error.is_some() {
            break state;
        }
        tokio::task::yield_now().await;
    };
    assert!(state.error.unwrap().contains("Decode") && !router.turns().is_ready());
}
