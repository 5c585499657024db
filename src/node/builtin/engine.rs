//! The engine: shared books, the prefill lane, and how a turn gets its room.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::core::ledger::{AdmitRequest, Ledger};
use crate::core::sync::SyncRule;
use crate::core::types::{Millis, SessionId, Tokens};
use crate::net::Network;
use crate::watch::{Follower, Watch};
use crate::wire::info::KvRole;
use crate::wire::log::Log;

use super::super::config::NodeConfig;
use super::super::d2p::sender::{Cause, DecodeKvSender};
use super::super::d2p::tier::Tier;
use super::super::error::NodeError;
use super::super::transfer::inbox::Inbox;
use super::super::transfer::message::Hello;
use super::backup::Evicted;
use super::lane::Lane;
use super::running::Running;
use super::state::{NotBegun, State};

/// A builtin worker's engine. All its clones of `Arc` share one pool.
#[derive(Debug)]
pub struct Engine {
    /// How it was started.
    pub config: NodeConfig,
    /// This incarnation.
    pub epoch: u64,
    /// The way to other nodes.
    pub(in crate::node) network: Arc<dyn Network>,
    /// Where transfers arrive.
    pub inbox: Arc<Inbox>,
    /// What goes to the backups of other workers.
    pub sync: DecodeKvSender,
    /// Transfers that arrive now.
    receiving: AtomicUsize,
    /// Who computes prompts now.
    pub(super) lane: Lane,
    started: Instant,
    state: Mutex<State>,
    changed: Arc<Watch<u64>>,
}

/// How a turn gets its room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// On a lease.
    Leased,
    /// Without one: as soon as the pool has room, first come first served.
    Forced,
}

impl Engine {
    /// An empty engine.
    pub fn new(config: NodeConfig, epoch: u64, network: Arc<dyn Network>) -> Arc<Self> {
        let ledger = Ledger::new(config.options.clone(), config.k_d, epoch);
        let limits = &config.limits;
        let rule = config.roles.contains(&KvRole::DecodeBackupSender).then(|| SyncRule::of(&config.options));
        let rule = rule.flatten();
        let mut state = State::new(ledger, Log::new(epoch, limits.event_backlog_bytes));
        state.backups.keeps_evicted = rule.is_some_and(|rule| rule.on_evict);
        if config.roles.contains(&KvRole::PrefillBackupReceiver) {
            state.backups.tier = Tier::new(config.options.blocks(config.host_tokens()));
        }
        Arc::new(Self {
            sync: DecodeKvSender::new(rule, config.options.block_tokens, limits.sync_queue_bytes),
            receiving: AtomicUsize::new(0),
            inbox: Inbox::new(limits.transfers_early, limits.transfer_patience),
            lane: Lane::default(),
            started: Instant::now(),
            state: Mutex::new(state),
            changed: Watch::new(0),
            config,
            epoch,
            network,
        })
    }

    /// One step on the books, at one point in time. Never await in it.
    pub fn with<R>(&self, step: impl FnOnce(&mut State, Millis) -> R) -> R {
        let elapsed = self.started.elapsed();
        #[cfg(feature = "fault-lab")]
        let elapsed = elapsed + crate::fault_lab::skew(&self.config.name);
        let now = elapsed.as_millis() as Millis;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let out = step(&mut state, now);
        let touched = state.settle();
        let evicted = std::mem::take(&mut state.backups.evicted);
        drop(state);
        for Evicted { session, blocks, targets } in evicted {
            for target in targets.iter() {
                self.sync.enqueue_sync(&session, blocks.clone(), &target.to, Cause::Evict, None);
            }
        }
        if touched {
            self.changed.modify(|version| *version += 1);
        }
        out
    }

    /// Counts up with every change of the books that others may wait for.
    pub fn changes(&self) -> Follower<u64> {
        Follower::new(&self.changed)
    }

    /// What both sides of a KV connection must agree on.
    pub fn hello(&self) -> Hello {
        Hello {
            protocol: crate::wire::PROTOCOL,
            model: self.config.model.clone(),
            block_tokens: self.config.options.block_tokens,
            kv_bytes_per_token: self.config.kv.kv_bytes_per_token,
            from: self.config.name.clone(),
            epoch: self.epoch,
        }
    }

    /// Transfers that arrive now: pushes give way to them.
    pub fn receiving(&self) -> usize {
        self.receiving.load(Relaxed)
    }

    /// Counts an arriving transfer until what it returns is dropped.
    pub(super) fn arriving(&self) -> impl Drop + use<'_> {
        struct Arriving<'a>(&'a AtomicUsize);
        impl Drop for Arriving<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Relaxed);
            }
        }
        self.receiving.fetch_add(1, Relaxed);
        Arriving(&self.receiving)
    }

    /// Tokens per block.
    pub(in crate::node) fn block(&self) -> Tokens {
        self.config.options.block_tokens.into()
    }

    /// Starts a turn, waiting for room for its whole prompt. Whoever drops the future or what it returns gives
    /// everything back.
    ///
    /// # Errors
    /// 409 when the lease is not there or was granted for another prompt; 413 when the prompt is longer than
    /// the pool; 429 when the queue is full or its deadline passed.
    pub(super) async fn begin(
        self: &Arc<Self>,
        turn: AdmitRequest,
        session: Option<SessionId>,
        entry: Entry,
    ) -> Result<Running, NodeError> {
        let pool = self.with(|s, _| s.pool.capacity()) as Tokens;
        if turn.input_len.div_ceil(self.block()) > pool {
            let message = format!("{} tokens are longer than the pool of this worker", turn.input_len);
            return Err(NodeError::too_large("kvc_prompt_too_large", message));
        }
        let (mut changes, mut ticket) = (self.changes(), None::<Ticket>);
        let deadline = Instant::now() + self.config.limits.queue_deadline;
        let mut running = loop {
            changes.catch_up();
            let place = ticket.as_ref().and_then(|t| t.number);
            let leased = entry == Entry::Leased;
            let begun = self.with(|s, now| s.begin(&turn, leased, place, now));
            match begun {
                Ok(begun) => break Running::new(self.clone(), turn, session, begun),
                Err(NotBegun::Mismatch(why)) => return Err(NodeError::plan_mismatch(why)),
                Err(NotBegun::NoRoom) if ticket.is_none() => {
                    ticket = Some(Ticket::take(self, leased.then_some(&turn.request_id))?);
                }
                Err(NotBegun::NoRoom) => wait(&mut changes, deadline).await?,
            }
        };
        drop(ticket);
        let whole = running.prompt_tokens();
        if running.cover(whole).await { Ok(running) } else { Err(no_room()) }
    }

    /// Releases expired leases; the node calls it now and then so that nobody has to come by for it.
    pub fn tick(&self) {
        self.with(|s, now| s.ledger.expire(now));
    }

    /// How often [`Self::tick`] is due.
    pub const TICK: Duration = Duration::from_millis(250);
}

/// Waits for a change of the books.
pub(super) async fn wait(changes: &mut Follower<u64>, deadline: Instant) -> Result<(), NodeError> {
    timeout_at(deadline, changes.changed()).await.map_err(|_| no_room())
}

fn no_room() -> NodeError {
    NodeError::busy("no room in the KV pool within the deadline")
}

/// A place in the queue for room; it leaves when the wait ends, however it ends. The lease of a turn that did not
/// begin goes back with it.
struct Ticket {
    engine: Arc<Engine>,
    number: Option<u64>,
    lease: Option<String>,
}

impl Ticket {
    fn take(engine: &Arc<Engine>, lease: Option<&String>) -> Result<Self, NodeError> {
        let most = engine.config.limits.queue_turns;
        let number = engine.with(|s, _| (s.waiting.len() < most).then(|| s.queue()));
        let ticket = Self { engine: engine.clone(), number, lease: lease.cloned() };
        if ticket.number.is_none() {
            return Err(NodeError::busy("the queue for KV room is full"));
        }
        Ok(ticket)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.engine.with(|s, now| {
            if let Some(number) = self.number {
                s.waiting.remove(&number);
            }
            if let Some(id) = &self.lease {
                s.give_back(id, now);
            }
            s.touched = true;
        });
    }
}

/// Prompt tokens that count as queued until they are computed or their turn is gone.
#[derive(Debug)]
pub(super) struct Queued {
    engine: Arc<Engine>,
    tokens: Tokens,
}

impl Queued {
    pub fn new(engine: &Arc<Engine>, tokens: Tokens) -> Self {
        let mut queued = Self { engine: engine.clone(), tokens: 0 };
        queued.set(tokens);
        queued
    }

    /// So many are left.
    pub fn set(&mut self, tokens: Tokens) {
        let before = std::mem::replace(&mut self.tokens, tokens);
        if before != tokens {
            self.engine.with(|s, _| {
                s.queued_tokens = s.queued_tokens - before + tokens;
                s.touched = true;
            });
        }
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.set(0);
    }
}
