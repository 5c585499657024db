//! Nodes in this process, and a client that does what a gateway would.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kvc_router::core::cost::CostModel;
use kvc_router::core::types::{BlockHash, Mode, SessionId};
use kvc_router::node::{Clock, Node, NodeConfig, reference_text};
use kvc_router::prompt::{Api, canonical, chain};
use kvc_router::wire::admit::{AdmitAnswer, AdmitHead, CONTENT_TYPE, encode};
use kvc_router::wire::info::KvRole;
use kvc_router::wire::plan::{PLAN_HEADER, Plan, Pull, Push, REPORT_HEADER, Report};
use serde_json::{Value, json};

pub const MODEL: &str = "kvc-builtin";

/// A node so fast that modelled time does not matter.
pub fn config(name: &str, role: KvRole) -> NodeConfig {
    let mut config = NodeConfig::new(name, [role]);
    config.cost = Clock { time_scale: 10_000.0, ..Clock::default() };
    config
}

pub async fn prefill() -> Node {
    Node::start(config("p", KvRole::Prefill)).await.unwrap()
}

pub async fn decode() -> Node {
    Node::start(config("d", KvRole::Decode)).await.unwrap()
}

/// A D whose decoding never gets anywhere: a turn on it stays where it is.
pub async fn stuck(name: &str, k_d: u64) -> Node {
    let mut config = config(name, KvRole::Decode);
    config.k_d = k_d;
    config.cost = Clock {
        model: CostModel { decode_base: 1e9, prefill_fixed: 0.0, ..CostModel::reference() },
        time_scale: 1.0,
    };
    Node::start(config).await.unwrap()
}

/// Text of about `tokens` tokens.
pub fn words(seed: &str, tokens: usize) -> String {
    let mut text: String = (0..).map(|i| format!("{seed}{i} ")).take(tokens).collect();
    text.truncate(tokens * 4);
    text
}

/// A conversation that grows.
#[derive(Clone, Default)]
pub struct Chat {
    pub messages: Vec<Value>,
    pub max_tokens: Option<u64>,
    pub tools: bool,
}

impl Chat {
    pub fn new(user: impl Into<String>) -> Self {
        let mut chat = Self::default();
        chat.say("user", user);
        chat
    }

    pub fn say(&mut self, role: &str, content: impl Into<String>) -> &mut Self {
        self.messages.push(json!({"role": role, "content": content.into()}));
        self
    }

    pub fn body(&self, stream: bool) -> Vec<u8> {
        let mut body = json!({"model": MODEL, "messages": self.messages, "stream": stream,
            "stream_options": {"include_usage": stream}});
        if let Some(max) = self.max_tokens {
            body["max_tokens"] = json!(max);
        }
        if self.tools {
            body["tools"] = json!([{"type": "function", "function": {"name": "ls", "parameters": {}}}]);
            body["tool_choice"] = json!("required");
        }
        body.to_string().into_bytes()
    }

    pub fn reference(&self) -> String {
        reference_text(MODEL, Api::Chat, &self.body(false)).unwrap()
    }

    /// What a gateway hashes.
    pub fn chain(&self) -> Vec<BlockHash> {
        chain(MODEL, &canonical(Api::Chat, &self.body(false)).unwrap())
    }

    pub fn tokens(&self) -> u64 {
        canonical(Api::Chat, &self.body(false)).unwrap().len().div_ceil(4) as u64
    }
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    pub fn report(&self) -> Report {
        serde_json::from_slice(self.headers[REPORT_HEADER].as_bytes()).unwrap()
    }

    /// The text of a chat answer, streamed or not.
    pub fn text(&self) -> String {
        assert_eq!(self.status, 200, "{}", self.body);
        if !self.body.starts_with("data: ") {
            return self.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        }
        assert!(self.body.ends_with("data: [DONE]\n\n"), "{}", self.body);
        self.events().iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect()
    }

    pub fn events(&self) -> Vec<Value> {
        let data = self.body.split("\n\n").filter_map(|e| e.strip_prefix("data: "));
        data.filter(|e| *e != "[DONE]").map(|e| serde_json::from_str(e).unwrap()).collect()
    }

    pub fn usage(&self) -> (u64, u64, u64) {
        let all = if self.body.starts_with("data: ") { self.events().pop().unwrap() } else { self.json() };
        let usage = &all["usage"];
        (
            usage["prompt_tokens"].as_u64().unwrap(),
            usage["completion_tokens"].as_u64().unwrap(),
            usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
        )
    }
}

pub fn client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).build_http()
}

pub async fn send(request: Request<Full<Bytes>>) -> Answer {
    let response = client().request(request).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer { status: head.status, headers: head.headers, body: String::from_utf8(body.to_vec()).unwrap() }
}

pub async fn get(node: &Node, path: &str) -> Answer {
    send(Request::get(format!("{}{path}", node.url())).body(Full::default()).unwrap()).await
}

pub async fn post(node: &Node, path: &str, kind: &str, body: impl Into<Bytes>) -> Answer {
    let request = Request::post(format!("{}{path}", node.url())).header("content-type", kind);
    send(request.body(Full::new(body.into())).unwrap()).await
}

pub async fn plain(node: &Node, body: Vec<u8>) -> Answer {
    post(node, "/v1/chat/completions", "application/json", body).await
}

pub fn request(node: &Node, plan: &Plan, body: Vec<u8>) -> Request<Full<Bytes>> {
    Request::post(format!("{}/v1/chat/completions", node.url()))
        .header(PLAN_HEADER, serde_json::to_string(plan).unwrap())
        .body(Full::new(body.into()))
        .unwrap()
}

pub async fn planned(node: &Node, plan: &Plan, body: Vec<u8>) -> Answer {
    send(request(node, plan, body)).await
}

pub async fn admit(node: &Node, id: &str, session: &str, turn: u32, chat: &Chat) -> AdmitAnswer {
    admit_known(node, id, session, turn, chat, 0).await
}

/// Admit with the first `known` blocks named only by their last hash.
pub async fn admit_known(
    node: &Node,
    id: &str,
    session: &str,
    turn: u32,
    chat: &Chat,
    known: usize,
) -> AdmitAnswer {
    let chain = chat.chain();
    let head = AdmitHead {
        request_id: id.into(),
        session: SessionId::new(session),
        turn,
        input_len: chat.tokens(),
        append_len: chat.tokens(),
        output_reserve: 0,
        known: known as u32,
        known_hash: known.checked_sub(1).map(|last| chain[last]),
    };
    let answer =
        post(node, "/admit_direct_append", CONTENT_TYPE, encode(&head, &chain[known..]).unwrap()).await;
    serde_json::from_str(&answer.body).unwrap_or_else(|e| panic!("{e}: {}", answer.body))
}

/// Mode and reusable blocks of a grant.
pub fn granted(answer: &AdmitAnswer) -> (Mode, u32) {
    match answer {
        AdmitAnswer::Admitted { mode, reuse_blocks, .. } => (*mode, *reuse_blocks),
        other => panic!("not admitted: {other:?}"),
    }
}

/// The plan of a D leg on a lease.
pub fn leased(node: &Node, id: &str, session: &str, mode: Mode, reuse_blocks: u32, pull: bool) -> Plan {
    Plan::Decode {
        request_id: id.into(),
        session: Some(SessionId::new(session)),
        mode,
        lease_epoch: Some(node.info().epoch),
        reuse_blocks,
        pull: pull.then(|| Pull { transfer_id: id.into(), from_block: reuse_blocks, blocks: None }),
        sync: Vec::new(),
    }
}

pub fn fallback(id: &str, session: Option<&str>) -> Plan {
    Plan::Decode {
        request_id: id.into(),
        session: session.map(SessionId::new),
        mode: Mode::Fallback,
        lease_epoch: None,
        reuse_blocks: 0,
        pull: None,
        sync: Vec::new(),
    }
}

pub fn prefill_plan(d: &Node, id: &str, session: &str, from_block: u32) -> Plan {
    Plan::Prefill {
        request_id: id.into(),
        session: SessionId::new(session),
        push: Push { transfer_id: id.into(), to: d.kv_addr().unwrap().to_string(), from_block },
    }
}

/// Both legs of a turn; when one fails the other is closed, as a gateway does.
pub async fn legs(d: &Node, decode: &Plan, p: &Node, prefill: &Plan, body: Vec<u8>) -> Answer {
    let mut answer = pin!(planned(d, decode, body.clone()));
    let mut done = pin!(planned(p, prefill, body));
    tokio::select! {
        answered = &mut answer => {
            if answered.status.is_success() {
                let done = done.await;
                assert_eq!(done.status, 200, "{}", done.body);
            }
            answered
        }
        done = &mut done => if done.status.is_success() { answer.await } else { done },
    }
}

/// A whole turn as a gateway runs it: admit, then the legs. `p`: use it for what is missing.
pub async fn turn(
    d: &Node,
    p: Option<&Node>,
    id: &str,
    session: &str,
    turn: u32,
    chat: &Chat,
) -> (Mode, Answer) {
    let (mode, reuse) = granted(&admit(d, id, session, turn, chat).await);
    let p = p.filter(|_| mode != Mode::Direct);
    let plan = leased(d, id, session, mode, reuse, p.is_some());
    let body = chat.body(true);
    let answer = match p {
        None => planned(d, &plan, body).await,
        Some(p) => legs(d, &plan, p, &prefill_plan(d, id, session, reuse), body).await,
    };
    (mode, answer)
}

/// Waits until `node`'s books satisfy `ready`.
pub async fn until(node: &Node, ready: impl Fn(&kvc_router::node::builtin::state::State) -> bool) {
    let engine: Arc<_> = node.engine().clone();
    let mut changes = engine.changes();
    let wait = async {
        loop {
            changes.catch_up();
            if engine.with(|s, _| ready(s)) {
                return;
            }
            changes.changed().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait).await.expect("the books never got there");
}

/// Nothing runs, waits or is granted; every slot is accounted for exactly once.
pub async fn at_rest(node: &Node) {
    until(node, |s| s.running() == 0 && s.waiting.is_empty() && s.ledger.leases() == 0).await;
    node.audit().unwrap();
    assert_eq!(node.engine().with(|s, _| s.queued_tokens), 0);
    assert_eq!(node.engine().inbox.waiting(), 0);
}
