//! The real backend: sessions say whose turn a request is, actors place it.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::LocalBoxFuture;
use serde_json::Value;
use tokio::time::Instant;

use super::backend::{self, Backend, Incoming};
use super::errors::ApiError;
use super::holds::{Asked, Holds};
use super::observe::Observed;
use crate::actors::api::{DispatchPlan, Failure, Refusal, TurnRequest, TurnResult, WorkerRef};
use crate::actors::grant::Grant;
use crate::actors::handle::TurnRouter;
use crate::core::types::{Millis, Mode};
use crate::explain::record::Record;
use crate::keeper::handback::HandBack;
use crate::keeper::local::Keepers;
use crate::sessions::{self, Headers, Limits, Registry, Stateful, credential};
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
    keepers: Option<Keepers>,
    shards: Vec<Mutex<Registry>>,
    hasher: std::hash::RandomState,
    records: Mutex<VecDeque<Box<Record>>>,
    started: Instant,
    draining: AtomicBool,
}

impl Live {
    /// A backend over running actors. `limits` hold for all shards together. `keepers`: where admission is decided here.
    pub fn new(turns: TurnRouter, limits: Limits, keepers: Option<Keepers>) -> Self {
        let each =
            Limits { records: limits.records.div_ceil(SHARDS), live: limits.live.div_ceil(SHARDS), ..limits };
        Self(Arc::new(Inner {
            turns,
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
    fn begin(&self, incoming: &Incoming<'_>) -> Result<(sessions::Turn, usize), ApiError> {
        let headers: Vec<(&str, &[u8])> =
            incoming.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        let request =
            sessions::Incoming { path: incoming.path, headers: Headers(&headers), body: incoming.body };
        let shard = self.shard(request.headers);
        let read = sessions::Request::read(&request, &self.0.shards[shard])
            .map_err(|bad| ApiError::bad_body(bad.message, bad.param))?;
        let turn = self.registry(shard).place(&read, self.now());
        if let Some(state) = turn.stateful.filter(|state| !state.known) {
            let message = format!(
                "`{}` refers to state this gateway does not know; send the whole conversation",
                state.field
            );
            return Err(ApiError::bad_body(message, Some(state.field)));
        }
        let models = self.models();
        if !models.is_empty() && !models.contains(&turn.model) {
            return Err(ApiError::model_not_found(&turn.model));
        }
        Ok((turn, shard))
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

    async fn place(&self, incoming: Incoming<'_>) -> Result<LiveTurn, ApiError> {
        let (turn, shard) = self.begin(&incoming)?;
        let request = TurnRequest {
            session: turn.session.clone(),
            turn: u32::try_from(turn.t).unwrap_or(u32::MAX),
            chain: turn.chain.clone(),
            input_len: turn.input_len,
            append_len: turn.append_len,
            max_output: turn.max_output.map(|tokens| tokens.saturating_mul(turn.n.max(1))),
            one_shot: turn.one_shot,
            explain: incoming.explain,
        };
        let mut grant = self.0.turns.route(request).await?;
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
            LiveTurn { live: self.clone(), shard, turn: Box::new(turn), grant, record, holds: None };
        placed.hold();
        Ok(placed)
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

    fn record(&self, name: &str) -> Option<Value> {
        let records = self.0.records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = records.iter().find(|record| record.name == name)?;
        serde_json::to_value([record]).ok()
    }
}

/// A placed turn of the real backend.
pub struct LiveTurn {
    live: Live,
    shard: usize,
    turn: Box<sessions::Turn>,
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

    fn finished(self, observed: Observed) {
        self.complete(&observed);
        let calls: Vec<&str> = observed.tool_calls.iter().map(String::as_str).collect();
        let responses: Vec<&str> = observed.response_id.iter().map(String::as_str).collect();
        let answer = sessions::Answer {
            ok: !observed.error,
            prompt_tokens: observed.prompt_tokens,
            completion_tokens: observed.completion_tokens,
            cached_tokens: observed.cached_tokens,
            calls: &calls,
            responses: &responses,
        };
        self.live.registry(self.shard).commit(&self.turn, &answer, self.live.now());
        self.grant.finished(TurnResult::from(&observed));
    }
}

fn state_out_of_reach(state: Stateful) -> ApiError {
    let message = format!(
        "the worker that keeps the state `{}` refers to cannot take this turn; send the whole conversation",
        state.field
    );
    ApiError::bad_body(message, Some(state.field))
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
