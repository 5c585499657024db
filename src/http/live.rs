//! The real backend: sessions say whose turn a request is, actors place it.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use serde_json::Value;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

use super::backend::{self, Backend, FleetChange, Incoming};
use super::errors::ApiError;
use super::holds::{Asked, Holds};
use super::observe::Observed;
use crate::actors::api::{DispatchPlan, Failure, Refusal, TurnRequest, TurnResult, WorkerRef};
use crate::actors::fleet::JoinError;
use crate::actors::gate::{Gate, Permit};
use crate::actors::grant::Grant;
use crate::actors::handle::TurnRouter;
use crate::actors::slot::Role;
use crate::actors::worker::{Health, WorkerState};
use crate::core::breaker::Fault;
use crate::core::types::{Millis, Mode};
use crate::explain::record::Record;
use crate::keeper::handback::HandBack;
use crate::keeper::local::Keepers;
use crate::prompt::{self, Api};
use crate::sessions::{self, Class, Headers, Limits, Registry, Stateful, credential};
use crate::settings::Settings;
use crate::telemetry::gauge_text;
use crate::tokens::{Counted, Exact};
use crate::translate;
use crate::wire::plan::Report;

/// Registries beside each other, so that requests of different clients don't wait for each other's lock.
const SHARDS: usize = 32;
/// Decision records kept for `/admin/explain`.
const RECORDS: usize = 64;
/// Sessions listed by `/admin/sessions`.
const LISTED: usize = 1000;
/// Headers that name a client's session in every one of its requests; with the credential they choose a shard.
/// Requests without one share their credential's shard, so lineage is found there.
const KEYS: [&str; 6] = [
    "x-kvc-session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "agent-session-id",
];

/// See the module. Clones share everything.
#[derive(Clone)]
pub struct Live(Arc<Inner>);

struct Inner {
    turns: TurnRouter,
    exact: Option<Exact>,
    keepers: Option<Keepers>,
    shards: Vec<Mutex<Registry>>,
    hasher: std::hash::RandomState,
    records: Mutex<VecDeque<Box<Record>>>,
    started: Instant,
    draining: AtomicBool,
}

impl Live {
    /// A backend over running actors. `limits` hold for all shards together. `keepers`: where admission is decided
    /// here. `exact` counts tokens where bytes are not enough.
    pub fn new(turns: TurnRouter, limits: Limits, keepers: Option<Keepers>, exact: Option<Exact>) -> Self {
        let each =
            Limits { records: limits.records.div_ceil(SHARDS), live: limits.live.div_ceil(SHARDS), ..limits };
        Self(Arc::new(Inner {
            turns,
            exact,
            keepers,
            shards: (0..SHARDS).map(|_| Mutex::new(Registry::new(each))).collect(),
            hasher: std::hash::RandomState::new(),
            records: Mutex::new(VecDeque::new()),
            started: Instant::now(),
            draining: AtomicBool::new(false),
        }))
    }

    /// The actors.
    pub fn turns(&self) -> &TurnRouter {
        &self.0.turns
    }

    /// Turns readiness off: load balancers send nothing new.
    pub fn drain(&self) {
        self.0.draining.store(true, Relaxed);
    }

    fn now(&self) -> Millis {
        self.0.started.elapsed().as_millis() as Millis
    }

    fn shard(&self, headers: Headers<'_>) -> usize {
        let mut hasher = self.0.hasher.build_hasher();
        credential(headers).hash(&mut hasher);
        KEYS.iter().find_map(|name| headers.raw(name)).hash(&mut hasher);
        hasher.finish() as usize % SHARDS
    }

    fn registry(&self, shard: usize) -> MutexGuard<'_, Registry> {
        // A panic inside would leave one request half indexed, which the next sweep repairs.
        self.0.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the request outside the lock, finds its lane inside. Returns the turn and its shard.
    fn begin(&self, incoming: &Incoming<'_>) -> Result<Begun, ApiError> {
        let headers: Vec<(&str, &[u8])> =
            incoming.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let request =
            sessions::Incoming { path: incoming.path, headers: Headers(&headers), body: incoming.body };
        let home = self.shard(request.headers);
        let read = sessions::Request::read(&request, &self.0.shards[home])?;
        if let Some(field) = read.fields().internal {
            return Err(ApiError::bad_body(format!("`{field}` is set by routers only"), Some(field.into())));
        }
        let shard = self.owner(&read, home);
        // What the workers see has hashes of its own; whose turn it is the client's own body says.
        let sent = incoming.sent.map(|sent| prompt::read(Api::Chat, sent, &())).transpose()?;
        let mut turn = self.registry(shard).place(&read, self.now());
        if let Some(state) = turn.stateful.filter(|state| !state.known) {
            let message = format!(
                "`{}` refers to state this gateway does not know; send the whole conversation",
                state.field
            );
            return Err(ApiError::bad_body(message, Some(state.field.into())));
        }
        if let Some(sent) = sent {
            turn.sent_as(&sent.layout().chain);
        }
        let counted = self.exactly(incoming, &mut turn);
        let models = self.models();
        if !models.is_empty() && !models.contains(&turn.model) {
            return Err(ApiError::model_not_found(&turn.model));
        }
        Ok(Begun { turn, shard, counted })
    }

    /// Counts the prompt as the engine will, where that is set and can be done.
    fn exactly(&self, incoming: &Incoming<'_>, turn: &mut sessions::Turn) -> Option<Counted> {
        let exact = self.0.exact.as_ref().filter(|_| turn.stateful.is_none())?;
        let translated = match (incoming.sent, turn.api) {
            (Some(_), _) | (None, Api::Chat) => None,
            // An engine that speaks the API itself renders the same conversation.
            (None, api) => Some(translate::request(api, incoming.body).ok()??.body),
        };
        let chat = translated.as_deref().or(incoming.sent.map(|sent| &**sent)).unwrap_or(incoming.body);
        let lane = (turn.class != Class::Probe).then_some(&turn.session);
        let counted = exact.count(lane, &turn.model, chat)?;
        turn.counted(counted.chain.clone(), counted.input_len, counted.append_len);
        Some(counted)
    }

    /// The shard of a request's lane: the owner's, for state that a request with other ids asks for.
    fn owner(&self, request: &sessions::Request<'_>, home: usize) -> usize {
        if !request.refers() || self.registry(home).owns(request) {
            return home;
        }
        (0..SHARDS).find(|&shard| self.registry(shard).owns(request)).unwrap_or(home)
    }

    fn keep(&self, record: Box<Record>) {
        let mut records = self.0.records.lock().unwrap_or_else(PoisonError::into_inner);
        if records.len() == RECORDS {
            records.pop_front();
        }
        records.push_back(record);
    }
}

impl Backend for Live {
    type Turn = LiveTurn;

    fn gate(&self) -> &Arc<Gate> {
        self.0.turns.gate()
    }

    async fn place(&self, incoming: Incoming<'_>, permit: Permit) -> Result<LiveTurn, ApiError> {
        let Begun { turn, shard, counted } = self.begin(&incoming)?;
        let request = TurnRequest {
            session: turn.session.clone(),
            turn: u32::try_from(turn.t).unwrap_or(u32::MAX),
            chain: turn.chain.clone(),
            input_len: turn.input_len,
            append_len: turn.append_len,
            max_output: turn.max_output.map(|tokens| tokens.saturating_mul(turn.n.max(1))),
            one_shot: turn.one_shot,
            hint: incoming.hint.and_then(|hint| hint.worker(&turn.session)).map(Arc::from),
            explain: incoming.explain,
        };
        let mut grant = self.0.turns.place(request, permit).await?;
        if let Some(state) = turn.stateful.filter(|_| grant.plan.mode != Mode::Direct) {
            // Only the worker that holds the conversation keeps the state it refers to.
            return Err(state_out_of_reach(state));
        }
        let record = grant.record.take().map(|record| {
            let name = record.name.clone();
            self.keep(record);
            name
        });
        let mut placed =
            LiveTurn { live: self.clone(), shard, turn: Box::new(turn), counted, grant, record, holds: None };
        placed.hold();
        Ok(placed)
    }

    fn count(&self, incoming: Incoming<'_>) -> Result<u64, ApiError> {
        self.begin(&incoming).map(|begun| begun.turn.input_len)
    }

    fn anyone(&self, nth: usize) -> Option<WorkerRef> {
        self.0.turns.idlest_decode(nth)
    }

    fn ready(&self) -> bool {
        !self.0.draining.load(Relaxed) && self.0.turns.is_ready()
    }

    fn models(&self) -> Vec<String> {
        self.0.turns.models()
    }

    async fn sessions(&self) -> Value {
        let (live, resting) = self.0.turns.sessions_known();
        let sessions = self.0.turns.sessions(LISTED).await;
        serde_json::json!({"live": live, "resting": resting, "sessions": sessions})
    }

    async fn workers(&self) -> Value {
        let turns = &self.0.turns;
        serde_json::json!({
            "workers": turns.workers().await,
            "router": turns.router().await,
            "inflight": turns.inflight(),
            "restarts": turns.restarts(),
            "d2p": turns.d2p(),
        })
    }

    async fn metrics(&self) -> String {
        let turns = &self.0.turns;
        let workers = turns.workers().await;
        let each = |value: fn(&WorkerState) -> f64| {
            let labels = |w: &WorkerState| {
                let role = if w.role == Role::Decode { "decode" } else { "prefill" };
                format!("worker=\"{}\",role=\"{role}\"", w.name)
            };
            workers.iter().map(move |w| (labels(w), value(w))).collect::<Vec<_>>()
        };
        type Gauge = (&'static str, &'static str, fn(&WorkerState) -> f64);
        let gauges: [Gauge; 11] = [
            ("kvc_worker_up", "Whether it takes turns", |w| f64::from(w.health == Health::Up)),
            ("kvc_worker_draining", "Whether it was told to take no new turns", |w| {
                f64::from(w.health == Health::Draining)
            }),
            ("kvc_worker_inflight", "Turns sent there and not ended", |w| f64::from(w.inflight)),
            ("kvc_worker_assigned", "Turns sent there so far", |w| w.assigned as f64),
            ("kvc_worker_backlog_tokens", "P: prompt tokens sent there and not computed", |w| {
                w.backlog_tokens as f64
            }),
            ("kvc_worker_pinned_tokens", "Prompt tokens of the live sessions pinned there", |w| {
                w.pinned_tokens as f64
            }),
            ("kvc_worker_sessions", "Sessions it holds", |w| w.sessions as f64),
            ("kvc_worker_kv_capacity_tokens", "Its KV pool", |w| w.load.k_d as f64),
            ("kvc_worker_kv_used_tokens", "What of it is taken", |w| w.load.used as f64),
            ("kvc_worker_kv_active_tokens", "What of it running turns hold", |w| w.load.active as f64),
            ("kvc_worker_resyncs", "Times its mirror was read anew", |w| w.resyncs as f64),
        ];
        let mut text: String =
            gauges.into_iter().map(|(name, help, value)| gauge_text(name, help, each(value))).collect();
        let (live, resting) = turns.sessions_known();
        let states = [("state=\"live\"", live), ("state=\"resting\"", resting)];
        let states = states.map(|(labels, n)| (labels.to_owned(), n as f64));
        text += &gauge_text("kvc_sessions", "Sessions known", states);
        let waiting = turns.router().await.map_or(0, |router| router.waiting);
        text += &gauge_text("kvc_waiting", "Turns waiting for room", [(String::new(), waiting as f64)]);
        text
    }

    async fn change(&self, change: FleetChange) -> Result<Value, ApiError> {
        let turns = &self.0.turns;
        let name = match change {
            FleetChange::Add { url, role, name } => turns.add_worker(&url, role, name)?.at.name.to_string(),
            FleetChange::Remove { name, within } => {
                // Looked at first: with nothing to wait for it is gone at once.
                let state = turns.worker(&name).await.ok_or_else(|| ApiError::no_worker(&name))?;
                turns.remove_worker(&name, within);
                return Ok(serde_json::json!(WorkerState { leaving: true, ..state }));
            }
            FleetChange::Drain { name, draining } => {
                turns.drain(&name, draining);
                name
            }
        };
        let state = turns.worker(&name).await.ok_or_else(|| ApiError::no_worker(&name))?;
        Ok(serde_json::json!(state))
    }

    fn adopt(&self, old: &Settings, new: &Settings) {
        let turns = &self.0.turns;
        turns.gate().resize(new.http.max_inflight);
        let within = Duration::from_secs(new.http.drain_s);
        let roles = [
            (Role::Decode, &old.fleet.decode, &new.fleet.decode),
            (Role::Prefill, &old.fleet.prefill, &new.fleet.prefill),
        ];
        for (role, old, new) in roles {
            for url in new.iter().filter(|url| !old.contains(url)) {
                if let Err(known) = turns.add_worker(url, role, None) {
                    tracing::info!(%known, "a worker of the settings is in the fleet already");
                }
            }
            for url in old.iter().filter(|url| !new.contains(url)) {
                if let Some(name) = turns.name_of(url, role) {
                    turns.remove_worker(&name, within);
                }
            }
        }
    }

    fn record(&self, name: &str) -> Option<Value> {
        let records = self.0.records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.iter().find(|record| record.name == name)?;
        serde_json::to_value([record]).ok()
    }
}

/// A request whose lane is known.
struct Begun {
    turn: sessions::Turn,
    shard: usize,
    counted: Option<Counted>,
}

/// A placed turn of the real backend.
pub struct LiveTurn {
    live: Live,
    shard: usize,
    turn: Box<sessions::Turn>,
    counted: Option<Counted>,
    grant: Grant,
    record: Option<String>,
    holds: Option<Holds>,
}

impl LiveTurn {
    /// Begins the turn in the books, if they are kept here.
    fn hold(&mut self) {
        let Some(keepers) = &self.live.0.keepers else { return };
        let turn = u32::try_from(self.turn.t).unwrap_or(u32::MAX);
        let asked = Asked { turn, chain: self.turn.chain.clone(), input_len: self.turn.input_len };
        self.holds = Some(Holds::begin(keepers, &mut self.grant.plan, &asked));
    }
}

impl backend::Turn for LiveTurn {
    fn plan(&self) -> &DispatchPlan {
        &self.grant.plan
    }

    fn record(&self) -> Option<&str> {
        self.record.as_deref()
    }

    async fn failed(mut self, failure: Failure) -> Result<Self, Refusal> {
        if let Some(holds) = self.holds.take() {
            holds.failed(&self.grant.plan, failure);
        }
        if let Some(state) = self.turn.stateful {
            let ApiError { code, message, .. } = state_out_of_reach(state);
            return Err(Refusal { status: 400, code, message, retry_after: None });
        }
        let grant = self.grant.failed(failure).await?;
        let mut placed = Self { grant, ..self };
        placed.hold();
        Ok(placed)
    }

    fn lost(&self) -> LocalBoxFuture<'static, Failure> {
        Box::pin(self.live.turns().lost(&self.grant.plan))
    }

    fn prefill_done(&self) {
        if let Some(holds) = &self.holds {
            holds.prefill_done();
        }
        self.grant.prefill_done();
    }

    fn complete(&self, observed: &Observed) {
        if let Some(holds) = &self.holds {
            holds.complete(observed);
        }
    }

    fn reported(&self, report: Report) {
        self.grant.reported(report);
    }

    fn hand_backs(&self) -> Vec<HandBack> {
        self.holds.as_ref().map_or_else(Vec::new, |holds| holds.hand_backs(&self.grant.plan))
    }

    fn broken(self, error: bool) {
        let session = self.grant.plan.session.as_str();
        let fault = if error { Fault::Error(xxh3_64(session.as_bytes())) } else { Fault::Broken };
        self.grant.broken(fault);
    }

    fn finished(self, observed: Observed) {
        self.complete(&observed);
        let calls: Vec<&str> = observed.tool_calls.iter().map(String::as_str).collect();
        let responses: Vec<&str> =
            observed.response_id.iter().chain(&observed.conversation).map(String::as_str).collect();
        let answer = sessions::Answer {
            ok: !observed.error,
            prompt_tokens: observed.prompt_tokens,
            completion_tokens: observed.completion_tokens,
            cached_tokens: observed.cached_tokens,
            calls: &calls,
            responses: &responses,
        };
        self.live.registry(self.shard).commit(&self.turn, &answer, self.live.now());
        if let (Some(exact), Some(counted), true) = (&self.live.0.exact, &self.counted, answer.ok) {
            exact.commit(&self.turn.session, counted, observed.completion_tokens, observed.cached_tokens);
        }
        self.grant.finished(TurnResult::from(&observed));
    }
}

impl From<JoinError> for ApiError {
    fn from(error: JoinError) -> Self {
        let (name, message) = ("worker_exists", error.to_string());
        Self::new(actix_web::http::StatusCode::CONFLICT, name, message)
    }
}

fn state_out_of_reach(state: Stateful) -> ApiError {
    let message = format!(
        "the worker that keeps the state `{}` refers to cannot take this turn; send the whole conversation",
        state.field
    );
    ApiError::bad_body(message, Some(state.field.into()))
}

impl From<crate::settings::Sessions> for Limits {
    fn from(sessions: crate::settings::Sessions) -> Self {
        Self {
            lanes: sessions.lanes_per_group,
            records: sessions.max_records,
            ttl: sessions.ttl_h * 3_600_000,
            ..Self::default()
        }
    }
}
