//! What all actors of one router share: configuration, the fleet, the way to the router actor, ids.
//! Nothing here is process-wide; several routers can live in one process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use ractor::ActorRef;
use tokio_util::task::TaskTracker;

use super::book::Book;
use super::lost::LostSessions;
use super::router::RouterMsg;
use super::slot::WorkerSlot;
use super::sync_meter::SyncMeter;
use super::transport::Transport;
use crate::core::breaker::Limits;
use crate::core::cost::CostModel;
use crate::core::options::Options;
use crate::core::turn::Rules;
use crate::core::types::WorkerId;
use crate::wire::admit::LeaseCall;

/// How a router is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The preset.
    pub options: Arc<Options>,
    /// What work costs: placement and the ladder.
    pub cost: Arc<CostModel>,
    /// Longest wait for an Admit answer.
    pub admit_timeout: Duration,
    /// Turns placed or running at once; more are refused.
    pub max_inflight: usize,
    /// Of these: turns of one session.
    pub max_session_turns: usize,
    /// When a worker that fails is left alone.
    pub breaker: Limits,
    /// Rest after which a session's actor stops and a small record stays.
    pub passivate: Duration,
    /// Rest after which the record is forgotten.
    pub session_ttl: Duration,
    /// Records kept at most.
    pub max_sessions: usize,
    /// Distinguishes this gateway's request ids from those of others that share the fleet.
    pub instance: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            options: Arc::new(Options::production()),
            cost: Arc::new(CostModel::reference()),
            admit_timeout: Duration::from_secs(1),
            max_inflight: 4096,
            max_session_turns: 4096,
            breaker: Limits { failures: 5, open_ms: 5000 },
            passivate: Duration::from_secs(300),
            session_ttl: Duration::from_secs(4 * 3600),
            max_sessions: 1_000_000,
            instance: 1,
        }
    }
}

/// See the module.
pub struct Shared {
    /// Set-up.
    pub config: Config,
    /// The way to the nodes.
    pub transport: Arc<dyn Transport>,
    /// Sessions, live and resting.
    pub book: Book,
    workers: ArcSwap<Vec<Arc<WorkerSlot>>>,
    /// The id the next worker gets; ids are never used again.
    next_worker: AtomicU32,
    /// Releases under way.
    pub(super) releases: TaskTracker,
    router: ArcSwapOption<ActorRef<RouterMsg>>,
    ids: AtomicU64,
    /// Pushes given to P workers in turn.
    targets: AtomicUsize,
    /// How D→P sync goes.
    pub sync: Arc<SyncMeter>,
    /// Sessions whose D has dropped KV.
    pub(super) lost: LostSessions,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shared")
    }
}

impl Shared {
    pub(super) fn new(config: Config, transport: Arc<dyn Transport>, workers: Vec<Arc<WorkerSlot>>) -> Self {
        let sync = Arc::<SyncMeter>::default();
        Self {
            book: Book::new(config.max_sessions),
            config,
            transport,
            next_worker: AtomicU32::new(workers.len() as u32),
            workers: ArcSwap::from_pointee(workers),
            releases: TaskTracker::new(),
            router: ArcSwapOption::empty(),
            ids: AtomicU64::new(1),
            targets: AtomicUsize::new(0),
            lost: LostSessions::new(sync.clone()),
            sync,
        }
    }

    /// The fleet, in the order of ids.
    pub fn workers(&self) -> Arc<Vec<Arc<WorkerSlot>>> {
        self.workers.load_full()
    }

    /// One worker; `None` when it has left.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<WorkerSlot>> {
        let workers = self.workers.load();
        let place = workers.binary_search_by_key(&id, |w| w.at.id).ok()?;
        workers.get(place).cloned()
    }

    /// The fleet with one worker more.
    pub(super) fn join(&self, slot: &Arc<WorkerSlot>) {
        self.workers.rcu(|workers| {
            let mut more = Vec::clone(workers);
            more.push(slot.clone());
            more.sort_by_key(|w| w.at.id);
            more
        });
    }

    /// The fleet without one of its workers.
    pub(super) fn part(&self, id: WorkerId) {
        self.workers.rcu(|workers| workers.iter().filter(|w| w.at.id != id).cloned().collect::<Vec<_>>());
    }

    pub(super) fn next_worker(&self) -> WorkerId {
        WorkerId(self.next_worker.fetch_add(1, Relaxed))
    }

    /// Gives a lease back, or whatever a lost Admit may have reserved. It passes no mailbox, so no actor's death loses it.
    pub(super) fn release(&self, worker: WorkerId, request_id: String) {
        let Some(slot) = self.worker(worker) else { return };
        let (at, transport, timeout) = (slot.at.clone(), self.transport.clone(), self.config.admit_timeout);
        // A request id is one attempt's. The node may be of an epoch the mirror has not heard of yet.
        let call = LeaseCall { request_id, epoch: 0 };
        let release = async move {
            // Best effort: a lease nobody returns expires.
            let _ = tokio::time::timeout(timeout, transport.release(&at, call)).await;
        };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            self.releases.spawn_on(release, &runtime);
        }
    }

    /// Sends to the router actor. Without one the message is dropped, which answers its reply.
    pub(super) fn router(&self, message: RouterMsg) {
        if let Some(actor) = &*self.router.load() {
            let _ = actor.cast(message);
        }
    }

    pub(super) fn install_router(&self, actor: ActorRef<RouterMsg>) {
        self.router.store(Some(Arc::new(actor)));
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Relaxed)
    }

    pub(super) fn next_target(&self) -> usize {
        self.targets.fetch_add(1, Relaxed)
    }

    pub(super) fn rules(&self) -> Rules<'_> {
        Rules { options: &self.config.options, cost: &self.config.cost }
    }
}
