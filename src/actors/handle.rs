//! The router as the rooms above see it: start it, ask it to place turns, look at its state, stop it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorRef};

use super::api::{DispatchPlan, Failure, Refusal, TurnRequest, WorkerRef};
use super::book::Live;
use super::fleet::new_slot;
use super::gate::{Gate, Permit};
use super::grant::{Pending, lost};
use super::reply::Reply;
use super::router::{RouterMsg, RouterState};
use super::session::{Placed, SessionActor, SessionArgs, SessionMsg, SessionView};
use super::shared::{Config, Shared};
use super::slot::{Role, WorkerSlot};
use super::supervisor::{Supervisor, SupervisorArgs, SupervisorMsg};
use super::sync_meter::SyncFigures;
use super::transport::Transport;
use super::worker::{Health, WorkerMsg, WorkerState};
use crate::core::types::WorkerId;

/// A worker to route to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerSpec {
    /// Its name in headers and metrics.
    pub name: String,
    /// Base URL without a trailing slash.
    pub url: String,
    /// P or D.
    pub role: Role,
}

/// A running router. Clones share it.
#[derive(Clone)]
pub struct TurnRouter {
    pub(super) shared: Arc<Shared>,
    pub(super) supervisor: ActorRef<SupervisorMsg>,
    gate: Arc<Gate>,
    fleet: Arc<Mutex<()>>,
    restarts: Arc<AtomicU64>,
}

impl TurnRouter {
    /// Starts the actors on the current runtime. Workers connect in the background: [`Self::is_ready`].
    ///
    /// # Errors
    /// An actor could not be spawned.
    pub async fn start(
        config: Config,
        workers: Vec<WorkerSpec>,
        transport: Arc<dyn Transport>,
    ) -> Result<Self, ractor::SpawnErr> {
        let gate = Gate::new(config.max_inflight);
        let workers = workers.into_iter().enumerate();
        let slots = workers.map(|(i, spec)| new_slot(WorkerId(i as u32), spec)).collect();
        let shared = Arc::new(Shared::new(config, transport, slots));
        let restarts = Arc::new(AtomicU64::new(0));
        let args = SupervisorArgs { shared: shared.clone(), restarts: restarts.clone() };
        let (supervisor, _) = Actor::spawn(None, Supervisor, args).await?;
        Ok(Self { shared, supervisor, gate, fleet: Arc::default(), restarts })
    }

    /// The gate that turns pass before they are placed. Whoever reads a body first takes its place first.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Takes a place at the gate and places a turn.
    ///
    /// # Errors
    /// As [`Self::place`]; 429 when the gate is full.
    pub async fn route(&self, request: TurnRequest) -> Placed {
        let permit = self.gate.enter().ok_or_else(overloaded)?;
        self.place(request, permit).await
    }

    /// Places a turn (Algorithms 1-3). Waits for as long as the wait queue holds it; dropping the future
    /// cancels the turn.
    ///
    /// # Errors
    /// Why the turn is not served, as an HTTP status with a code and a message.
    pub async fn place(&self, request: TurnRequest, permit: Permit) -> Placed {
        // A session actor that dies before it has placed the turn loses nothing: a new one takes it.
        for _ in 0..2 {
            let (reply, placed) = Reply::channel();
            let pending = self.begin(request.clone(), reply);
            let placed = placed.await;
            if let Some(pending) = pending {
                pending.answered();
            }
            if let Some(placed) = placed {
                return placed.map(|grant| grant.admit(Some(permit)));
            }
        }
        Err(lost())
    }

    /// Sends the turn to its session's actor. What cannot be sent is dropped, which answers its reply.
    fn begin(&self, request: TurnRequest, reply: Reply<Placed>) -> Option<Pending> {
        let session = request.session.clone();
        let one_shot = request.one_shot;
        let spawn = |record| {
            let waiting = Arc::new(AtomicU32::new(0));
            let args = SessionArgs {
                id: session.clone(),
                shared: self.shared.clone(),
                record,
                waiting: waiting.clone(),
                one_shot,
            };
            let (actor, _) =
                ractor::ActorRuntime::<SessionActor>::spawn_instant(None, SessionActor, args).ok()?;
            Some(Live { actor, waiting })
        };
        let turn = self.shared.next_id();
        let message = SessionMsg::Begin { turn, request: Box::new(request), reply };
        let actor = if one_shot {
            spawn(None).filter(|live| live.deliver(message).is_ok())?.actor
        } else {
            self.shared.book.send(&session, message, spawn)?
        };
        Some(Pending::new(actor, turn))
    }

    /// Whether a turn could be served now: at least one D is up.
    pub fn is_ready(&self) -> bool {
        self.shared.workers().iter().any(|w| w.role == Role::Decode && w.is_up())
    }

    /// Waits until every worker is up, `limit` at most. Returns whether all are.
    pub async fn all_up(&self, limit: Duration) -> bool {
        let all = async {
            while !self.shared.workers().iter().all(|w| w.is_up()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(limit, all).await.is_ok()
    }

    /// Names of the models the D workers serve, sorted. Empty until one has answered.
    pub fn models(&self) -> Vec<String> {
        let workers = self.shared.workers();
        let decode = workers.iter().filter(|w| w.role == Role::Decode);
        let models: std::collections::BTreeSet<String> =
            decode.filter_map(|w| w.model()).map(|m| (*m).clone()).collect();
        models.into_iter().collect()
    }

    /// The D with the fewest running turns, or the `nth` after it: for a request that is nobody's turn.
    pub fn idlest_decode(&self, nth: usize) -> Option<WorkerRef> {
        let workers = self.shared.workers();
        let up = workers.iter().filter(|w| w.role == Role::Decode && w.is_up());
        let mut up: Vec<_> = up.map(|w| (w.inflight(), &w.at)).collect();
        up.sort_by_key(|(inflight, at)| (*inflight, at.id));
        up.get(nth).map(|(_, at)| (*at).clone())
    }

    /// Waits until one of a plan's workers stops to answer, and says what that means for the turn.
    pub fn lost(&self, plan: &DispatchPlan) -> impl Future<Output = Failure> + Send + use<> {
        let slot = |at: &WorkerRef| self.shared.worker(at.id);
        let (decode, prefill) = (slot(&plan.decode), plan.prefill.as_ref().and_then(slot));
        async move {
            let gone = |slot: Option<Arc<WorkerSlot>>| async move {
                match slot {
                    Some(slot) => slot.lost().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = gone(decode) => Failure::DecodeUnreachable,
                () = gone(prefill) => Failure::PrefillUnreachable,
            }
        }
    }

    /// Turns being placed or executed.
    pub fn inflight(&self) -> usize {
        self.gate.inside()
    }

    /// Actors restarted so far.
    pub fn restarts(&self) -> u64 {
        self.restarts.load(Relaxed)
    }

    /// `(live, resting)` sessions.
    pub fn sessions_known(&self) -> (usize, usize) {
        self.shared.book.counts()
    }

    /// The state of every worker actor. One that does not answer is shown as down.
    pub async fn workers(&self) -> Vec<WorkerState> {
        let mut states = Vec::new();
        for slot in self.shared.workers().iter() {
            let (reply, state) = Reply::channel();
            slot.cast(WorkerMsg::Observe(reply));
            states.push(state.await.unwrap_or_else(|| silent(slot)));
        }
        states
    }

    /// The state of up to `limit` live session actors.
    pub async fn sessions(&self, limit: usize) -> Vec<SessionView> {
        let mut views = Vec::new();
        for (_, actor) in self.shared.book.live(limit) {
            let (reply, view) = Reply::channel();
            if actor.cast(SessionMsg::Observe(reply)).is_ok() {
                views.extend(view.await);
            }
        }
        views
    }

    /// What D→P sync has achieved so far.
    pub fn d2p(&self) -> SyncFigures {
        self.shared.sync.figures()
    }

    /// The router actor's state.
    pub async fn router(&self) -> Option<RouterState> {
        let (reply, state) = Reply::channel();
        self.shared.router(RouterMsg::Observe(reply));
        state.await
    }

    pub(super) fn fleet_lock(&self) -> MutexGuard<'_, ()> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no turn is left and every lease is on its way back, `limit` at most. Returns the turns left.
    pub async fn settled(&self, limit: Duration) -> usize {
        let quiet = async {
            while self.inflight() > 0 || self.shared.workers().iter().any(|w| w.inflight() > 0) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            // Every session actor has read what it was told before, and what it gives back is on its way.
            self.sessions(usize::MAX).await;
            self.shared.releases.close();
            self.shared.releases.wait().await;
        };
        let _ = tokio::time::timeout(limit, quiet).await;
        self.inflight()
    }

    /// Stops all actors. Turns being placed are refused.
    pub async fn stop(&self) {
        for (_, actor) in self.shared.book.live(usize::MAX) {
            actor.stop(None);
        }
        let _ = self.supervisor.stop_and_wait(None, Some(Duration::from_secs(5))).await;
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

fn silent(slot: &WorkerSlot) -> WorkerState {
    WorkerState {
        id: slot.at.id,
        url: slot.at.url.to_string(),
        leaving: slot.is_leaving(),
        name: slot.at.name.to_string(),
        role: slot.role,
        health: Health::Down,
        error: Some("its actor does not answer".into()),
        epoch: 0,
        seq: 0,
        sessions: 0,
        blocks: 0,
        backup_blocks: 0,
        inflight: slot.inflight(),
        assigned: slot.assigned(),
        backlog_tokens: slot.backlog(),
        pinned_tokens: slot.pinned_tokens(),
        load: Default::default(),
        resyncs: 0,
        engine: None,
    }
}

fn overloaded() -> Refusal {
    Refusal {
        status: 429,
        code: "overloaded",
        message: "Too many requests are being served. Try again shortly.".into(),
        retry_after: Some(1),
    }
}
