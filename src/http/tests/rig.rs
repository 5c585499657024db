//! A gateway with a scripted backend, and a client that sees every byte.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use actix_web::dev::ServerHandle;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::actors::api::{DispatchPlan, Failure, Refusal, WorkerRef};
use crate::actors::gate::{Gate, Permit};
use crate::core::types::{Mode, Rung, SessionId};
use crate::engines::client::Connector;
use crate::engines::fake;
use crate::http::Gateway;
use crate::http::backend::{Backend, Incoming, Turn};
use crate::http::errors::ApiError;
use crate::http::observe::Observed;
use crate::http::server;
use crate::settings::{Layers, Settings};

/// What the gateway told its backend.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    Placed {
        path: &'static str,
        body: Vec<u8>,
        explain: bool,
    },
    Failed(Failure),
    Finished(Observed),
    /// Dropped without an end.
    Dropped,
}

type Placement = Result<DispatchPlan, ApiError>;

/// Gives out scripted placements, in order; then refuses.
#[derive(Clone)]
pub(super) struct Script {
    placements: Arc<Mutex<VecDeque<Placement>>>,
    events: mpsc::UnboundedSender<Event>,
    gate: Arc<Gate>,
}

pub(super) struct ScriptTurn {
    plan: DispatchPlan,
    script: Script,
    ended: bool,
    permit: Option<Permit>,
}

impl Script {
    pub fn empty(events: mpsc::UnboundedSender<Event>) -> Self {
        Self { placements: Arc::default(), events, gate: Gate::new(1024) }
    }

    fn next(&self, permit: Option<Permit>) -> Result<ScriptTurn, ApiError> {
        let next = self.placements.lock().unwrap().pop_front();
        let plan = next.unwrap_or_else(|| Err(refusal().into()))?;
        Ok(ScriptTurn { plan, script: self.clone(), ended: false, permit })
    }

    fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

pub(super) fn refusal() -> Refusal {
    Refusal { status: 429, code: "no_capacity", message: "full".into(), retry_after: Some(7) }
}

impl Backend for Script {
    type Turn = ScriptTurn;

    fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    async fn place(&self, incoming: Incoming<'_>, permit: Permit) -> Result<ScriptTurn, ApiError> {
        let Incoming { path, body, explain, .. } = incoming;
        self.tell(Event::Placed { path, body: body.to_vec(), explain });
        self.next(Some(permit))
    }

    fn count(&self, incoming: Incoming<'_>) -> Result<u64, ApiError> {
        Ok(incoming.body.len() as u64 / 4)
    }

    fn anyone(&self, nth: usize) -> Option<WorkerRef> {
        let placements = self.placements.lock().unwrap();
        let mut plans = placements.iter().filter_map(|placement| placement.as_ref().ok());
        plans.nth(nth).map(|plan| plan.decode.clone())
    }

    fn ready(&self) -> bool {
        !self.placements.lock().unwrap().is_empty()
    }

    fn models(&self) -> Vec<String> {
        vec!["builtin".into()]
    }

    async fn sessions(&self) -> Value {
        json!({"sessions": []})
    }

    async fn workers(&self) -> Value {
        json!({"workers": []})
    }
}

impl Turn for ScriptTurn {
    fn plan(&self) -> &DispatchPlan {
        &self.plan
    }

    async fn failed(mut self, failure: Failure) -> Result<Self, Refusal> {
        self.ended = true;
        self.script.tell(Event::Failed(failure));
        let permit = self.permit.take();
        self.script.next(permit).map_err(|_| refusal())
    }

    fn finished(mut self, observed: Observed) {
        self.ended = true;
        self.script.tell(Event::Finished(observed));
    }
}

impl Drop for ScriptTurn {
    fn drop(&mut self) {
        if !self.ended {
            self.script.tell(Event::Dropped);
        }
    }
}

/// A one-leg plan to `decode`.
pub(super) fn direct(decode: &str) -> DispatchPlan {
    DispatchPlan {
        request_id: "r1".into(),
        session: SessionId::new("scope/conv-1"),
        one_shot: false,
        mode: Mode::Direct,
        rung: Rung::Append,
        decode: fake::worker_ref(1, decode),
        prefill: None,
        reuse_blocks: 0,
        lease: None,
        restore_blocks: 0,
        sync: Vec::new(),
        slot: None,
        replaced: 0,
    }
}

/// A running gateway.
pub(super) struct Rig {
    pub addr: SocketAddr,
    pub admin: Option<SocketAddr>,
    pub events: mpsc::UnboundedReceiver<Event>,
    handle: ServerHandle,
}

impl Rig {
    /// Starts one with these settings (`http.` keys) and placements.
    pub fn with(flags: &[(&str, &str)], placements: Vec<Placement>) -> Self {
        Self::set(
            flags.iter().map(|(key, value)| (format!("http.{key}"), (*value).to_owned())).collect(),
            placements,
        )
    }

    /// Starts one with these settings.
    pub fn set(flags: Vec<(String, String)>, placements: Vec<Placement>) -> Self {
        let mut layers = Layers { flags, ..Layers::default() };
        for (key, value) in [("listen", "127.0.0.1:0"), ("workers", "1")] {
            layers.flags.insert(0, (format!("http.{key}"), value.to_owned()));
        }
        let settings = Settings::load(&layers).unwrap().settings;
        let (tell, events) = mpsc::unbounded_channel();
        let placements = Arc::new(Mutex::new(placements.into()));
        let script = Script { placements, events: tell, gate: Gate::new(settings.http.max_inflight) };
        let gateway = Gateway::new(&settings, script, Connector::new(&settings.fleet).unwrap());
        let serving = server::start(gateway).unwrap();
        let (addr, admin, handle) = (serving.addrs[0], serving.admin, serving.server.handle());
        actix_web::rt::spawn(serving.server);
        Self { addr, admin, events, handle }
    }

    /// A client's side of a server at a base URL.
    pub fn at(url: &str) -> Bare {
        Bare(url.trim_start_matches("http://").parse().unwrap())
    }

    /// A client's side of a gateway that runs already.
    pub fn front(serving: server::Serving) -> Self {
        let (_, events) = mpsc::unbounded_channel();
        let (addr, admin, handle) = (serving.addrs[0], serving.admin, serving.server.handle());
        actix_web::rt::spawn(serving.server);
        Self { addr, admin, events, handle }
    }

    pub fn new(placements: Vec<DispatchPlan>) -> Self {
        Self::with(&[], placements.into_iter().map(Ok).collect())
    }

    /// The next thing the backend was told after the placement.
    pub async fn end(&mut self) -> Event {
        loop {
            match self.events.recv().await.unwrap() {
                Event::Placed { .. } => {}
                event => return event,
            }
        }
    }

    pub async fn post(&self, headers: &str, body: impl AsRef<[u8]>) -> Answer {
        let mut client = self.open(headers, body).await;
        client.answer().await
    }

    /// Sends a chat request and leaves the answer to the test.
    pub async fn open(&self, headers: &str, body: impl AsRef<[u8]>) -> Client {
        self.open_at("/v1/chat/completions?q=1", headers, body).await
    }

    pub async fn post_to(&self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        self.open_at(path, "", body).await.answer().await
    }

    async fn open_at(&self, path: &str, headers: &str, body: impl AsRef<[u8]>) -> Client {
        let body = body.as_ref();
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: gw\r\ncontent-length: {}\r\n{headers}\r\n", body.len());
        let mut client = self.connect().await;
        client.0.write_all(head.as_bytes()).await.unwrap();
        let _ = client.0.write_all(body).await;
        client
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.bare("GET", path, "").await
    }

    /// A request without a body.
    pub async fn bare(&self, method: &str, path: &str, headers: &str) -> Answer {
        let mut client = self.connect().await;
        let head = format!("{method} {path} HTTP/1.1\r\nhost: gw\r\n{headers}\r\n");
        client.0.write_all(head.as_bytes()).await.unwrap();
        client.answer().await
    }

    pub async fn connect(&self) -> Client {
        Client(TcpStream::connect(self.addr).await.unwrap(), Vec::new())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        drop(self.handle.stop(false));
    }
}

/// A server's address, to be asked.
pub(super) struct Bare(SocketAddr);

impl Bare {
    pub async fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let mut client = Client(TcpStream::connect(self.0).await.unwrap(), Vec::new());
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: n\r\ncontent-length: {length}\r\n");
        client.0.write_all(format!("{head}{headers}\r\n{body}").as_bytes()).await.unwrap();
        client.answer().await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "", "").await
    }

    pub async fn post(&self, headers: &str, body: impl AsRef<str>) -> Answer {
        self.send("POST", "/v1/chat/completions", headers, body.as_ref()).await
    }
}

/// A client connection.
pub(super) struct Client(pub TcpStream, Vec<u8>);

/// An answer as it came.
#[derive(Debug)]
pub(super) struct Answer {
    pub head: String,
    pub body: String,
    /// Whether the body ended as its framing says.
    pub whole: bool,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub fn headers(&self, name: &str) -> Vec<&str> {
        let split = self.head.lines().filter_map(|l| l.split_once(": "));
        split.filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v).collect()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers(name).first().copied().unwrap_or("")
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

impl Client {
    /// Waits until `text` has arrived.
    pub async fn until(&mut self, text: &str) {
        while !String::from_utf8_lossy(&self.1).contains(text) {
            assert!(self.more().await, "closed; so far: {}", String::from_utf8_lossy(&self.1));
        }
    }

    async fn more(&mut self) -> bool {
        self.0.read_buf(&mut self.1).await.unwrap_or(0) > 0
    }

    /// Reads one answer, or what there is of it.
    pub async fn answer(&mut self) -> Answer {
        self.until("\r\n\r\n").await;
        let end = self.1.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
        let head = String::from_utf8(self.1.drain(..end).collect()).unwrap();
        let mut answer = Answer { head, body: String::new(), whole: false };
        let body = if answer.header("transfer-encoding") == "chunked" {
            self.chunked(&mut answer.whole).await
        } else {
            let length: usize = answer.header("content-length").parse().unwrap();
            while self.1.len() < length && self.more().await {}
            answer.whole = self.1.len() >= length;
            self.1.drain(..length.min(self.1.len())).collect()
        };
        answer.body = String::from_utf8(body).unwrap();
        answer
    }

    async fn chunked(&mut self, whole: &mut bool) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let Some(line) = self.1.windows(2).position(|w| w == b"\r\n") else {
                if self.more().await {
                    continue;
                }
                return body;
            };
            let size = std::str::from_utf8(&self.1[..line]).unwrap();
            let size = usize::from_str_radix(size, 16).unwrap();
            while self.1.len() < line + 4 + size {
                if !self.more().await {
                    return body;
                }
            }
            body.extend_from_slice(&self.1[line + 2..line + 2 + size]);
            self.1.drain(..line + 4 + size);
            if size == 0 {
                *whole = true;
                return body;
            }
        }
    }
}
