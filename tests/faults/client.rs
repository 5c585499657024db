//! A client: an agent session over the gateway, which knows what a cold worker would have said.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::ServiceResponse;
use actix_web::test::TestRequest;
use futures_core::future::LocalBoxFuture;
use kvc_router::actors::handle::TurnRouter;
use kvc_router::core::options::Options;
use kvc_router::node::{Model, reference_text_with};
use kvc_router::prompt::Api;
use kvc_router::watch::{Follower, Watch};
use tokio::time::{Instant, timeout};

use super::dice::Rng;
use super::net::Net;
use super::schedule::{Leave, Sort, TurnPlan};
use super::speech::{self, Seen};

pub const MODEL: &str = "m";
pub const KV: Model = Model { kv_bytes_per_token: 8 };
/// Longest time until a request has its whole answer, or an error.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A gateway as its clients see it.
pub type Service = Rc<dyn Fn(TestRequest) -> LocalBoxFuture<'static, ServiceResponse<BoxBody>>>;

/// How requests ended, as clients see it.
#[derive(Debug, Default, Clone, Copy)]
pub struct Ends {
    pub asked: u64,
    pub served: u64,
    pub direct: u64,
    pub refused: u64,
    pub broken: u64,
    pub left: u64,
    pub cut: u64,
}

/// Where a gateway's clients knock.
pub struct Door {
    /// `None` while it is away.
    pub service: RefCell<Option<Service>>,
    /// Its actors, and its instance.
    pub turns: RefCell<Option<(TurnRouter, u64)>>,
    /// Counts up with every start.
    pub life: Arc<Watch<u64>>,
}

/// What all clients share.
pub struct World {
    pub net: Arc<Net>,
    pub gateways: Vec<Door>,
    pub ends: RefCell<Ends>,
    /// Turns served, by session, gateway and its start.
    pub answered: RefCell<Vec<(String, usize, u64)>>,
    pub calm: bool,
    /// The longest a client waited.
    pub longest: Cell<Duration>,
    pub options: Options,
}

/// One client session.
pub struct Client {
    world: Rc<World>,
    name: String,
    api: Api,
    system: String,
    history: RefCell<Vec<(&'static str, String)>>,
    words: RefCell<Rng>,
}

impl Client {
    pub fn new(world: &Rc<World>, number: usize, api: Api, seed: u64, shared: usize) -> Rc<Self> {
        let system = text(&mut Rng::new(42), shared);
        let words = RefCell::new(Rng::new(seed ^ (number as u64 + 1).wrapping_mul(0x9E37)));
        let name = format!("s{number}");
        Rc::new(Self { world: world.clone(), name, api, system, history: RefCell::default(), words })
    }

    /// Takes its turns, one after another or beside each other.
    pub async fn live(self: Rc<Self>, turns: Vec<TurnPlan>) {
        let mut beside = Vec::new();
        for turn in turns {
            tokio::time::sleep(turn.rest).await;
            let this = self.clone();
            let asked = tokio::task::spawn_local(async move { this.turn(turn).await });
            if turn.parallel {
                beside.push(asked);
            } else {
                let _ = asked.await;
            }
        }
        for asked in beside {
            let _ = asked.await;
        }
    }

    /// One more turn, of which nothing may go wrong.
    pub async fn proves(self: &Rc<Self>, gateway: usize) {
        let turn = TurnPlan {
            rest: Duration::ZERO,
            sort: Sort::Append,
            bytes: 96,
            max_tokens: 4,
            stream: true,
            leave: Leave::Never,
            parallel: false,
            gateway,
            api: self.api,
        };
        let seen = self.turn(turn).await;
        if seen.is_some_and(|seen| !matches!(seen.status, 200 | 413 | 429)) {
            self.world.net.rules.violated(format!("{}: not served when all is well again", self.name));
        }
    }

    async fn turn(&self, turn: TurnPlan) -> Option<Seen> {
        let (body, grown) = self.prompt(&turn);
        let reference = reference_text_with(KV, MODEL, turn.api, body.as_bytes()).unwrap();
        let started = Instant::now();
        let outcome = timeout(DEADLINE, self.ask(&turn, body)).await;
        let span = started.elapsed();
        let world = &self.world;
        world.longest.set(world.longest.get().max(span));
        let Ok(outcome) = outcome else {
            world.net.rules.violated(format!("{}: no answer within {} s", self.name, DEADLINE.as_secs()));
            return None;
        };
        let turns = world.gateways[turn.gateway].turns.borrow().clone();
        if let Some((turns, instance)) = turns {
            for view in turns.sessions(100).await {
                world.net.rules.session(instance, &view, &world.options);
            }
        }
        let seen = outcome?;
        self.judge(&turn, &seen, &reference);
        if seen.complete && seen.error.is_none() && turn.sort != Sort::Side && turn.sort != Sort::Sub {
            let mut history = self.history.borrow_mut();
            *history = grown;
            history.push(("assistant", seen.text.clone()));
        }
        Some(seen)
    }

    /// The body of a turn, and the conversation with it.
    fn prompt(&self, turn: &TurnPlan) -> (String, Vec<(&'static str, String)>) {
        let mut rng = self.words.borrow_mut();
        let new = text(&mut rng, turn.bytes);
        let mut grown = match turn.sort {
            Sort::Append => self.history.borrow().clone(),
            Sort::Compact => vec![("user", format!("so far: {}", text(&mut rng, 200)))],
            Sort::Sub | Sort::Side => Vec::new(),
        };
        if turn.sort == Sort::Compact {
            grown.push(("assistant", "go on".into()));
        }
        grown.push(("user", new));
        (speech::body(turn, &self.system, &grown), grown)
    }

    async fn ask(&self, turn: &TurnPlan, body: String) -> Option<Seen> {
        let world = &self.world;
        let mut request = TestRequest::post()
            .uri(speech::path(turn.api))
            .insert_header(("content-type", "application/json"))
            .insert_header(("x-claude-code-session-id", self.name.as_str()))
            .set_payload(body);
        request = match turn.sort {
            Sort::Side => request.insert_header(("x-claude-code-request-class", "auxiliary")),
            Sort::Sub => request.insert_header(("x-claude-code-agent-id", "sub")),
            _ => request,
        };
        let door = &world.gateways[turn.gateway];
        let mut life = Follower::new(&door.life);
        let service = loop {
            let service = door.service.borrow().clone();
            match service {
                Some(service) => break service,
                None => life.changed().await,
            }
        };
        life.catch_up();
        world.ends.borrow_mut().asked += 1;
        let answer = service(request);
        drop(service);
        let answer = async {
            tokio::select! {
                biased;
                answer = answer => Some(answer),
                _ = life.changed() => None,
            }
        };
        let response = match turn.leave {
            Leave::Before(after) => timeout(after, answer).await.ok().flatten(),
            _ => answer.await,
        };
        let Some(response) = response else {
            let mut ends = world.ends.borrow_mut();
            if matches!(turn.leave, Leave::Before(_)) {
                ends.left += 1
            } else {
                ends.cut += 1
            }
            return None;
        };
        self.read(turn, response, life).await
    }

    async fn read(
        &self,
        turn: &TurnPlan,
        response: ServiceResponse<BoxBody>,
        mut life: Follower<u64>,
    ) -> Option<Seen> {
        let header = |name: &str| {
            let value = response.headers().get(name).and_then(|v| v.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        let mut seen = Seen {
            status: response.status().as_u16(),
            mode: header("x-kvc-mode"),
            reason: header("x-kvc-reason"),
            worker: header("x-kvc-worker"),
            ..Seen::default()
        };
        let session = header("x-kvc-session");
        let sse = header("content-type").starts_with("text/event-stream");
        let mut body = response.into_body();
        let (mut bytes, mut pieces) = (Vec::new(), 0);
        let broken = loop {
            let piece = tokio::select! {
                biased;
                piece = std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_next(cx)) => piece,
                _ = life.changed() => {
                    self.world.ends.borrow_mut().cut += 1;
                    return None;
                }
            };
            match piece {
                Some(Ok(piece)) => bytes.extend_from_slice(&piece),
                Some(Err(_)) => break true,
                None => break false,
            }
            pieces += 1;
            if turn.leave == Leave::Within(pieces) && seen.status == 200 {
                drop(body);
                seen.read(turn.api, sse, &bytes);
                // At the last event is no cancellation.
                if seen.over {
                    self.served(turn, session, &seen);
                } else {
                    self.world.ends.borrow_mut().left += 1;
                }
                return None;
            }
        };
        seen.read(turn.api, sse, &bytes);
        seen.complete &= !broken;
        if seen.status != 200 {
            self.world.ends.borrow_mut().refused += 1;
        } else if seen.complete && seen.error.is_none() {
            self.served(turn, session, &seen);
        } else {
            self.world.ends.borrow_mut().broken += 1;
        }
        Some(seen)
    }

    fn served(&self, turn: &TurnPlan, session: String, seen: &Seen) {
        let world = &self.world;
        let mut ends = world.ends.borrow_mut();
        ends.served += 1;
        ends.direct += u64::from(seen.mode == "direct");
        world.net.serves(&session, &seen.worker);
        let life = world.gateways[turn.gateway].life.get();
        world.answered.borrow_mut().push((session, turn.gateway, life));
    }

    /// Whether an answer is what was promised.
    fn judge(&self, turn: &TurnPlan, seen: &Seen, reference: &str) {
        let rules = &self.world.net.rules;
        let (name, status, reason) = (&self.name, seen.status, &seen.reason);
        self.world.net.trace.push("answered", status.into(), seen.text.len() as u64);
        if seen.mode.is_empty() {
            rules.violated(format!("{name}: an answer ({status}) without a mode"));
        }
        if status == 200 {
            let right = match seen.complete && seen.error.is_none() && !seen.short {
                true => seen.text == reference,
                false => reference.starts_with(&seen.text),
            };
            if !right {
                rules.violated(format!(
                    "{name}: wrong text ({}, {}, complete {}): {:?} for {reference:?}",
                    seen.mode, seen.reason, seen.complete, seen.text
                ));
            }
            let counts = seen.tokens.is_none_or(|tokens| tokens == seen.text.len() as u64 / 4);
            if seen.complete && seen.error.is_none() && !counts {
                rules.violated(format!("{name}: {:?} tokens said of {:?}", seen.tokens, seen.text));
            }
            if seen.misnumbered {
                rules.violated(format!("{name}: events out of order"));
            }
            if turn.stream && !seen.complete && seen.error.is_none() {
                rules.violated(format!("{name}: a stream broke off without an error event"));
            }
            return;
        }
        if !matches!(status, 413 | 429 | 502 | 503 | 504) {
            rules.violated(format!("{name}: status {status}, {reason}"));
        }
        if seen.error.is_none() {
            rules.violated(format!(
                "{name}: an error ({status}, {reason}) without a body in the API's format"
            ));
        }
        if status == 504 && !rules.is_silent() {
            rules.violated(format!("{name}: timed out although nothing was silent"));
        }
        if self.world.calm && !matches!(status, 413 | 429) && reason != "overloaded" {
            rules.violated(format!("{name}: {status} {reason} although nothing went wrong"));
        }
    }
}

/// Words of `bytes` bytes.
fn text(rng: &mut Rng, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 9);
    while text.len() < bytes {
        text.push_str(&format!("{:x} ", rng.next() >> 40));
    }
    text.truncate(bytes);
    text
}
