//! What must hold at every moment, and what is remembered to check it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use http::Response;
use http_body_util::{BodyExt as _, Full};
use kvc_router::core::ledger::LedgerEvent;
use kvc_router::core::options::{Accounting, Eviction, Options, Reserve};
use kvc_router::core::types::Tokens;
use kvc_router::fault_lab::Site;
use kvc_router::node::builtin::engine::Engine;
use kvc_router::node::http::Body;
use kvc_router::wire::admit::{AdmitAnswer, AdmitHead};
use kvc_router::wire::events::{NodeEvent, Numbered};

use super::node::SimNode;
use super::trace::Trace;

/// Every so many messages the whole books of all nodes are audited.
const AUDIT: u64 = 48;

/// Instance, session, worker.
type Asked = (String, String, String);

#[derive(Debug, Clone)]
struct Granted {
    node: String,
    epoch: u64,
    id: String,
    /// By the node's own clock, in ms.
    until: u64,
    begun: bool,
}

#[derive(Debug, Default)]
struct Inner {
    violations: Vec<String>,
    /// Rejects a gateway has heard of.
    rejects: BTreeMap<Asked, u32>,
    /// Who asks, by instance, session and place in the conversation.
    asks: BTreeMap<(String, String, u32), String>,
    /// Sessions of which two turns claim one place: one of them may be a side request, whose rejects are counted apart
    /// by the gateway but not here.
    mixed: BTreeSet<String>,
    /// The actor that decides for a session, by (instance, session).
    deciding: HashMap<(u64, String), u64>,
    /// Workers that may be a session's pin.
    homes: BTreeMap<String, Vec<String>>,
    /// The last changes a node told, of this epoch and the one before.
    last: Vec<(Option<Numbered>, Option<Numbered>)>,
    granted: Vec<Granted>,
    /// Attempts whose admission was heard, with the rejects it reset.
    resets: HashMap<String, Option<(Asked, u32)>>,
    /// What happened before the first violation.
    tail: String,
}

/// See the module.
#[derive(Debug)]
pub struct Rules {
    trace: Arc<Trace>,
    inner: Mutex<Inner>,
    /// Something was silent: timeouts are a fair answer.
    silent: AtomicBool,
    /// A release may have been lost: leases may last until they expire.
    leaky: AtomicBool,
    /// A session actor lost its memory: pins and rejects cannot be foretold.
    forgetful: AtomicBool,
}

impl Rules {
    pub fn new(nodes: usize, trace: Arc<Trace>) -> Self {
        let inner = Inner { last: vec![(None, None); nodes], ..Inner::default() };
        let no = || AtomicBool::new(false);
        Self { trace, inner: Mutex::new(inner), silent: no(), leaky: no(), forgetful: no() }
    }

    pub fn violated(&self, what: impl Into<String>) {
        let mut inner = self.inner.lock().unwrap();
        let what = what.into();
        if inner.violations.is_empty() {
            inner.tail = self.trace.tail();
        }
        if inner.violations.len() < 8 && !inner.violations.contains(&what) {
            inner.violations.push(what);
        }
    }

    pub fn violations(&self) -> Vec<String> {
        self.inner.lock().unwrap().violations.clone()
    }

    /// What happened before the first violation.
    pub fn tail(&self) -> String {
        self.inner.lock().unwrap().tail.clone()
    }

    pub fn silenced(&self) {
        self.silent.store(true, Relaxed);
    }

    pub fn is_silent(&self) -> bool {
        self.silent.load(Relaxed)
    }

    pub fn loses_releases(&self) {
        self.leaky.store(true, Relaxed);
    }

    pub fn is_leaky(&self) -> bool {
        self.leaky.load(Relaxed)
    }

    pub fn forgetful(&self) {
        self.forgetful.store(true, Relaxed);
    }

    /// A node died: what was granted there is void.
    pub fn disturbed(&self, _node: usize) {
        self.loses_releases();
    }

    /// Physical use ≤ K_d; expired leases are void.
    pub fn instant(&self, nodes: &[Arc<SimNode>], count: u64) {
        for node in nodes {
            let Some(life) = node.life() else { continue };
            let engine = &life.app.engine;
            let problem = engine.with(|s, now| {
                let (used, pool) = (s.ledger.occupied_blocks(), s.ledger.pool_blocks());
                if used > pool {
                    return Some(format!("{used} of {pool} blocks in use"));
                }
                let mut inner = self.inner.lock().unwrap();
                for lease in inner.granted.iter_mut().filter(|l| l.node == *node.name && !l.begun) {
                    if lease.epoch == engine.epoch && s.ledger.is_taken(&lease.id) {
                        lease.begun = true;
                        // It may have begun at any time since the last look.
                        if now > lease.until + 400 {
                            return Some(format!(
                                "a turn began on a lease that expired at {}, now {now}",
                                lease.until
                            ));
                        }
                    }
                }
                if count.is_multiple_of(AUDIT) { s.audit().err() } else { None }
            });
            if let Some(problem) = problem {
                self.violated(format!("{}: {problem}", node.name));
            }
        }
    }

    /// Admission keeps reservations within ρ·K_d.
    pub fn admitted(&self, engine: &Engine, before: usize) {
        let options = &engine.config.options;
        if options.reserve != Reserve::Lease || options.accounting != Accounting::Marginal {
            return;
        }
        let block = Tokens::from(options.block_tokens);
        let after = engine.with(|s, _| s.ledger.kept_blocks());
        let most = options.high_water(engine.config.k_d);
        if after > before && after as Tokens * block > most {
            self.violated(format!(
                "{}: an Admit left {after} blocks that can't give way, over rho K_d",
                engine.config.name
            ));
        }
    }

    /// A gateway has heard what a worker says to an Admit.
    pub fn answered(&self, head: &AdmitHead, worker: &str, answer: &AdmitAnswer) {
        let instance = head.request_id.split('-').next().unwrap_or_default().to_owned();
        let mut inner = self.inner.lock().unwrap();
        let session = head.session.public().to_owned();
        let turn = head.request_id.rsplit_once('-').map_or("", |(turn, _)| turn).to_owned();
        let place = (instance.clone(), session.clone(), head.turn);
        if *inner.asks.entry(place).or_insert_with(|| turn.clone()) != turn {
            inner.mixed.insert(session.clone());
        }
        let key = (instance, session.clone(), worker.to_owned());
        match answer {
            AdmitAnswer::Rejected { .. } => *inner.rejects.entry(key).or_default() += 1,
            // Its turn was over when it came.
            AdmitAnswer::Admitted { .. } if inner.resets.contains_key(&head.request_id) => {}
            AdmitAnswer::Admitted { .. } => {
                let before = inner.rejects.insert(key.clone(), 0);
                inner.resets.insert(head.request_id.clone(), before.map(|n| (key, n)));
            }
            _ => {}
        }
    }

    /// A gateway gives an attempt back: its turn may have been over before the admission was heard.
    pub fn gave_back(&self, request_id: &str) {
        let mut inner = self.inner.lock().unwrap();
        if let Some((key, before)) = inner.resets.insert(request_id.to_owned(), None).flatten() {
            *inner.rejects.entry(key).or_default() += before;
        }
    }

    /// Reads what a worker says to an Admit, before it is on its way.
    pub async fn look(&self, engine: &Engine, answer: Response<Body>) -> Response<Body> {
        let (head, body) = answer.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        if let Ok(answer) = serde_json::from_slice::<AdmitAnswer>(&bytes) {
            self.terms(&engine.config.options, &engine.config.name, &answer);
            if let AdmitAnswer::Admitted { lease, .. } = answer {
                let until = engine.with(|_, now| now) + lease.ttl_ms;
                self.granted(&engine.config.name, engine.epoch, &lease.request_id, until);
            }
        }
        Response::from_parts(head, Full::new(bytes).map_err(|never| match never {}).boxed_unsync())
    }

    /// A worker granted a lease, by its own clock.
    fn granted(&self, node: &str, epoch: u64, id: &str, until: u64) {
        let mut inner = self.inner.lock().unwrap();
        inner.granted.retain(|l| !l.begun && l.until + 60_000 > until);
        if !inner.granted.iter().any(|l| l.id == id && l.node == node && l.epoch == epoch) {
            let (node, id) = (node.to_owned(), id.to_owned());
            inner.granted.push(Granted { node, epoch, id, until, begun: false });
        }
    }

    /// Checks the terms of an admission.
    fn terms(&self, options: &Options, node: &str, answer: &AdmitAnswer) {
        let AdmitAnswer::Admitted { terms, .. } = answer else { return };
        let used = match options.eviction {
            Eviction::None => terms.used,
            Eviction::Blocks | Eviction::Lru => terms.used.saturating_sub(terms.evictable),
        };
        let added = match options.accounting {
            Accounting::Input => terms.input_len,
            Accounting::Marginal => terms.input_len.saturating_sub(terms.reused),
        };
        if used + added > options.high_water(terms.k_d) {
            self.violated(format!("{node}: admitted beyond rho K_d: {terms:?}"));
        }
    }

    /// Decisions of a session are one actor's.
    pub fn decides(&self, site: Site<'_>) {
        let Site::Session { instance, session, actor, begins: true } = site else { return };
        let mut inner = self.inner.lock().unwrap();
        let known = inner.deciding.entry((instance, session.public().to_owned())).or_insert(actor);
        if *known > actor {
            let what = format!("two actors decide for session {}", session.public());
            drop(inner);
            self.violated(what);
        } else {
            *known = actor;
        }
    }

    /// Keeps the last changes of each epoch; returns those of the epoch before.
    pub fn remember(&self, node: usize, name: &str, message: &Numbered) -> Option<Numbered> {
        let mut inner = self.inner.lock().unwrap();
        let (old, last) = &mut inner.last[node];
        if last.as_ref().is_some_and(|last| last.epoch < message.epoch) {
            *old = last.take();
        }
        // Those that say who holds what do most harm when they come late.
        let holds = |change: &LedgerEvent| matches!(change, LedgerEvent::Held(held) if held.tokens > 0);
        if matches!(&message.event, NodeEvent::Changes(changes) if changes.iter().any(holds)) {
            *last = Some(message.clone());
        }
        let old = old.clone().filter(|old| old.epoch < message.epoch);
        drop(inner);
        if let NodeEvent::Changes(changes) = &message.event {
            for change in changes {
                if let LedgerEvent::Held(held) = change {
                    self.served(held.session.public(), name);
                }
            }
        }
        old
    }

    /// A session was served at a worker, so it may be its pin.
    pub fn served(&self, session: &str, worker: &str) {
        let mut inner = self.inner.lock().unwrap();
        let homes = inner.homes.entry(session.to_owned()).or_default();
        if !homes.iter().any(|home| home == worker) {
            homes.push(worker.to_owned());
        }
    }

    /// Checks what a session actor at rest knows.
    pub fn session(&self, instance: u64, view: &kvc_router::actors::session::SessionView, options: &Options) {
        if view.running > 0 || self.forgetful.load(Relaxed) {
            return;
        }
        let inner = self.inner.lock().unwrap();
        let mut problems = Vec::new();
        let instance = format!("{instance:x}");
        for (worker, counted) in &view.rejects {
            let key = (instance.clone(), view.session.clone(), worker.clone());
            let heard = inner.rejects.get(&key).copied().unwrap_or(0);
            if *counted > heard && !inner.mixed.contains(&view.session) {
                problems.push(format!(
                    "{}: {counted} rejects by {worker}, {heard} since it was admitted",
                    view.session
                ));
            }
        }
        let homes = inner.homes.get(&view.session);
        if options.commit == kvc_router::core::options::Commit::Success
            && let Some(pin) = &view.pin
            && !homes.is_some_and(|homes| homes.contains(pin))
        {
            problems.push(format!("{} is pinned to {pin}, which never served it", view.session));
        }
        drop(inner);
        problems.into_iter().for_each(|problem| self.violated(problem));
    }
}
