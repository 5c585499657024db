//! The worker actor, one per P and D: a mirror of what the worker holds, its counts, and the proxy of the Admit
//! RPC. Slow work (RPCs, the event feed) runs beside the mailbox and comes back as messages.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::backup::runs;
use super::feed;
use super::gather::GatherSlot;
use super::lost::{Dropped, Moved};
use super::reply::Reply;
use super::rpc::{self, Admission, AdmitAsk};
use super::slot::{Role, WorkerSlot};
use super::transport::Transport;
use crate::core::breaker::{Breaker, Fault, Limits};
use crate::core::cost::Backup;
use crate::core::ledger::{LedgerEvent, LoadReport};
use crate::core::options::Options;
use crate::core::residency::{Change, Residency};
use crate::core::route::{Candidate, PrefillView, overlap};
use crate::core::turn::Answer;
use crate::core::types::{BlockHash, BlockHashing, Millis, SessionId, Tokens, WorkerId};
use crate::wire::events::{NodeEvent, Numbered, Snapshot};
use crate::wire::info::{KvRole, NodeInfo};

mod mirror;

/// What the actor of one worker needs.
#[derive(Clone)]
pub struct WorkerArgs {
    /// The worker.
    pub slot: Arc<WorkerSlot>,
    /// The preset.
    pub options: Arc<Options>,
    /// The way to the node.
    pub transport: Arc<dyn Transport>,
    /// Longest wait for an Admit answer.
    pub admit_timeout: Duration,
    /// When it is left alone.
    pub breaker: Limits,
    /// Told when room may have been freed at this worker.
    pub on_room: Arc<dyn Fn() + Send + Sync>,
    /// Told what the sessions of this worker gain and lose.
    pub on_change: Arc<dyn Fn(Moved<'_>) + Send + Sync>,
}

/// Messages of a worker actor.
pub enum WorkerMsg {
    /// ⟨overlap, inflight, assigned, load⟩ for a prompt.
    Score {
        /// `s(r)`.
        session: SessionId,
        /// `prefix_hashes(r)`.
        chain: Arc<[BlockHash]>,
        /// Where the answer goes.
        slot: GatherSlot,
    },
    /// Proxy an Admit RPC.
    Admit(AdmitAsk, Reply<Admission>),
    /// The node answered on a new connection.
    Connected(NodeInfo),
    /// The feed brought something. The reply is the feed's credit for the next one: the mailbox stays short.
    Fed(Numbered, Reply<()>),
    /// The node's feed broke and it does not answer: what runs there is given up.
    Lost(String),
    /// One call did not get through: no new turns until the feed shows a sign of life.
    Unreached(String),
    /// How a turn sent there ended.
    Outcome(Outcome),
    /// It was left alone for long enough.
    Retry,
    /// Observable state.
    Observe(Reply<WorkerState>),
    /// Panics in its handler.
    #[cfg(test)]
    Panic,
}

/// What the end of a turn says about its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It was served.
    Served,
    /// The worker failed.
    Failed(Fault),
    /// Nothing: the client left, it was refused, it was placed elsewhere.
    Ended,
}

/// Whether a worker takes turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// Not connected yet.
    Connecting,
    /// Connected, mirror in step.
    Up,
    /// Connected, takes no new turns.
    Draining,
    /// Connected, but its turns failed: left alone for a while, then tried with one turn.
    Tripped,
    /// Cannot be reached.
    Down,
}

/// What a worker actor shows of itself.
#[derive(Debug, Clone, serde::Serialize)]
pub struct WorkerState {
    /// Its id; never used again.
    pub id: WorkerId,
    /// Name.
    pub name: String,
    /// Base URL.
    pub url: String,
    /// P or D.
    pub role: Role,
    /// Whether it takes turns.
    pub health: Health,
    /// Whether it leaves the fleet when what runs there has ended.
    pub leaving: bool,
    /// Why it is down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Incarnation of the node.
    pub epoch: u64,
    /// Last event seen.
    pub seq: u64,
    /// Sessions in the mirror.
    pub sessions: usize,
    /// Blocks in the mirror.
    pub blocks: usize,
    /// P: blocks in its backup tier.
    pub backup_blocks: usize,
    /// `inflight`.
    pub inflight: u32,
    /// `assigned`.
    pub assigned: u64,
    /// P: prompt tokens dispatched and not done.
    pub backlog_tokens: Tokens,
    /// Prompt tokens of live sessions pinned here.
    pub pinned_tokens: Tokens,
    /// Last load report.
    pub load: LoadReport,
    /// Times the mirror was read anew: first contact, gaps, new epochs.
    pub resyncs: u64,
    /// Its engine, where the gateway keeps its books.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<serde_json::Value>,
}

/// State of a worker actor.
pub struct WorkerActorState {
    args: WorkerArgs,
    mirror: Residency,
    /// Blocks in the node's backup tier.
    backups: hashbrown::HashSet<BlockHash, BlockHashing>,
    load: Option<LoadReport>,
    epoch: u64,
    seq: u64,
    k_d: Tokens,
    /// Connected, as far as the last sign of it says. Any healthy sample clears a mark of failure.
    up: bool,
    /// The node says it is not what the settings take it for.
    wrong_role: bool,
    /// When this incarnation of the node was first seen: it starts cold.
    since: Option<Instant>,
    error: Option<String>,
    resyncs: u64,
    breaker: Breaker,
    started: Instant,
    feed: AbortHandle,
}

impl Drop for WorkerActorState {
    fn drop(&mut self) {
        self.feed.abort();
        self.args.slot.set_up(false);
    }
}

/// See the module.
pub struct WorkerActor;

impl Actor for WorkerActor {
    type Msg = WorkerMsg;
    type State = WorkerActorState;
    type Arguments = WorkerArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<WorkerMsg>,
        args: WorkerArgs,
    ) -> Result<WorkerActorState, ActorProcessingErr> {
        args.slot.install(myself.clone());
        let feed = tokio::spawn(feed::run(myself, args.slot.at.clone(), args.transport.clone()));
        Ok(WorkerActorState {
            breaker: Breaker::new(args.breaker),
            started: Instant::now(),
            args,
            mirror: Residency::default(),
            backups: hashbrown::HashSet::default(),
            load: None,
            epoch: 0,
            seq: 0,
            k_d: 0,
            up: false,
            wrong_role: false,
            since: None,
            error: None,
            resyncs: 0,
            feed: feed.abort_handle(),
        })
    }

    async fn handle(
        &self,
        _myself: ActorRef<WorkerMsg>,
        message: WorkerMsg,
        state: &mut WorkerActorState,
    ) -> Result<(), ActorProcessingErr> {
        fault_site!(crate::fault_lab::Site::Worker(&state.args.slot.at.name));
        state.handle(message);
        fault_site!(crate::fault_lab::Site::Done("worker"));
        Ok(())
    }
}

impl WorkerActorState {
    fn handle(&mut self, message: WorkerMsg) {
        match message {
            WorkerMsg::Score { session, chain, slot } => self.score(&session, &chain, slot),
            WorkerMsg::Admit(ask, reply) => self.admit(ask, reply),
            WorkerMsg::Connected(info) => self.connected(&info),
            WorkerMsg::Fed(message, credit) => {
                self.fed(message);
                credit.send(());
            }
            WorkerMsg::Lost(error) => {
                self.args.slot.set_reachable(false);
                self.down(error);
            }
            WorkerMsg::Unreached(error) => self.down(error),
            WorkerMsg::Outcome(outcome) => self.outcome(outcome),
            WorkerMsg::Retry => {
                self.publish();
                (self.args.on_room)();
            }
            WorkerMsg::Observe(reply) => reply.send(self.observe()),
            #[cfg(test)]
            WorkerMsg::Panic => panic!("asked to"),
        }
    }

    fn down(&mut self, error: String) {
        let name = &self.args.slot.at.name;
        if self.up || self.error.as_ref() != Some(&error) {
            tracing::warn!(worker = %name, error, "a worker is down");
        }
        self.error = Some(error);
        self.up = false;
        self.publish();
    }

    fn publish(&self) {
        self.args.slot.set_up(self.up && !self.breaker.is_open(self.now()));
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    fn outcome(&mut self, outcome: Outcome) {
        let (now, was) = (self.now(), self.breaker.is_open(self.now()));
        match outcome {
            Outcome::Served => self.breaker.served(now),
            Outcome::Failed(fault) => self.breaker.failed(fault, now),
            Outcome::Ended => self.breaker.ended(now),
        }
        let name = &self.args.slot.at.name;
        if let Some(until) = self.breaker.opens_at().filter(|_| !was && self.breaker.is_open(now)) {
            let ms = until.saturating_sub(now);
            tracing::warn!(worker = %name, ms, "a worker's turns fail; it is left alone");
            if let Some(myself) = self.args.slot.actor() {
                myself.send_after(Duration::from_millis(ms), || WorkerMsg::Retry);
            }
        }
        self.publish();
    }

    fn health(&self) -> Health {
        match (self.up, &self.error) {
            (true, _) if self.breaker.is_open(self.now()) => Health::Tripped,
            (true, _) if self.args.slot.is_draining() => Health::Draining,
            (true, _) => Health::Up,
            (false, Some(_)) => Health::Down,
            (false, None) => Health::Connecting,
        }
    }

    /// Lines 6-9 of Algorithm 1, from the mirror. A worker that is not up drops the slot: no candidate.
    fn score(&self, session: &SessionId, chain: &[BlockHash], gather: GatherSlot) {
        if self.health() != Health::Up || !self.breaker.allows(self.now()) {
            return;
        }
        let slot = &self.args.slot;
        match slot.role {
            Role::Prefill => {
                let runs = self.runs(chain);
                let held = runs.first().filter(|run| run.start == 0).map_or(0, |run| run.end);
                let view = PrefillView {
                    id: slot.at.id,
                    backlog: slot.backlog(),
                    held: Tokens::from(held) * Tokens::from(self.args.options.block_tokens),
                };
                gather.prefill(view, runs);
            }
            Role::Decode => gather.decode(Candidate {
                id: slot.at.id,
                overlap: overlap(chain, &self.mirror, &self.args.options),
                resident: self.mirror.get(session).map_or(0, |held| held.tokens),
                inflight: slot.inflight(),
                assigned: slot.assigned(),
                load: self.load,
                pinned_tokens: slot.pinned_tokens(),
                warm: self.warm(),
                backup: Backup::default(),
            }),
        }
    }

    /// What this P could send of a prompt.
    fn runs(&self, chain: &[BlockHash]) -> Vec<Range<u32>> {
        let front = self.mirror.prefix(chain);
        let chain = if self.backups.is_empty() { &chain[..front] } else { chain };
        runs(chain, front, |block| self.backups.contains(block) || self.mirror.contains(*block))
    }

    fn warm(&self) -> f64 {
        let ramp = self.args.options.ramp_ms.max(1) as f64;
        self.since.map_or(0.0, |since| (since.elapsed().as_millis() as f64 / ramp).min(1.0))
    }

    fn admit(&mut self, ask: AdmitAsk, reply: Reply<Admission>) {
        if self.args.slot.is_draining() || !self.breaker.send(self.now()) {
            // That changed after it was chosen; nothing was asked of its node yet.
            reply.send(Answer::Unreachable.into());
            return;
        }
        let known = self.mirror.own_prefix(&ask.session, &ask.chain);
        let (slot, transport) = (self.args.slot.clone(), self.args.transport.clone());
        tokio::spawn(rpc::admit(slot, transport, ask, known, self.args.admit_timeout, reply));
    }

    fn observe(&self) -> WorkerState {
        let slot = &self.args.slot;
        WorkerState {
            id: slot.at.id,
            name: slot.at.name.to_string(),
            url: slot.at.url.to_string(),
            role: slot.role,
            health: self.health(),
            leaving: slot.is_leaving(),
            error: self.error.clone(),
            epoch: self.epoch,
            seq: self.seq,
            sessions: self.mirror.sessions().len(),
            blocks: self.mirror.blocks(),
            backup_blocks: self.backups.len(),
            inflight: slot.inflight(),
            assigned: slot.assigned(),
            backlog_tokens: slot.backlog(),
            pinned_tokens: slot.pinned_tokens(),
            load: self.load.unwrap_or(LoadReport { k_d: self.k_d, ..LoadReport::default() }),
            resyncs: self.resyncs,
            engine: self.args.transport.observe(&slot.at),
        }
    }
}
