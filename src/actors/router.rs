//! The router actor: sends score queries to the worker actors, owns the round robins and the wait queue.

use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::time::Instant;

use super::gather::{self, Fleet};
use super::reply::Reply;
use super::session::{SessionMsg, TurnEvent, TurnKey};
use super::shared::Shared;
use super::slot::Role;
use super::worker::WorkerMsg;
use crate::core::dispatch::RoundRobin;
use crate::core::queue::{Pushed, WaitQueue};
use crate::core::route::PrefillView;
use crate::core::types::{BlockHash, Millis, SessionId, Tokens, WorkerId};

/// Turns woken in vain when room is freed once; the rest wait for more of it.
const MAX_VAIN: usize = 16;

/// A turn that enters the wait queue. Lost on the way or with the queue, it tells its turn to ask again: nobody waits
/// for an actor that died.
#[derive(Debug)]
pub struct Waiting {
    /// The turn.
    pub turn: TurnKey,
    /// Its session.
    pub session: ActorRef<SessionMsg>,
    /// Whose turn it is.
    pub id: SessionId,
    /// Tokens to compute.
    pub work: Tokens,
    /// Its wait is over, and whoever ended it said so.
    pub over: bool,
}

impl Waiting {
    /// Ends its wait without a word.
    fn leaves(mut self) {
        self.over = true;
    }

    fn tell(&self, event: TurnEvent) -> bool {
        self.session.cast(SessionMsg::Event { turn: self.turn, event }).is_ok()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.over && !planted!(WaiterLost) {
            self.tell(TurnEvent::RoomFreed);
        }
    }
}

/// Messages of the router actor.
pub enum RouterMsg {
    /// Score a prompt on every worker.
    Gather {
        /// `s(r)`.
        session: SessionId,
        /// `prefix_hashes(r)`.
        chain: Arc<[BlockHash]>,
        /// The workers that are up.
        reply: Reply<Fleet>,
    },
    /// Line 15.
    PickPrefill(Reply<Option<WorkerId>>),
    /// Lines 26-27. `None`: no D is up.
    PickFallback(Reply<Option<(Option<WorkerId>, WorkerId)>>),
    /// Enter the wait queue. A turn that was woken in vain keeps its age.
    Wait(Waiting),
    /// Leave it: the turn was admitted (others may fit too) or its client is gone.
    Leave(TurnKey),
    /// A lease ended, or a worker came up.
    RoomFreed,
    /// Look for passed deadlines.
    Deadline,
    /// Observable state.
    Observe(Reply<RouterState>),
    /// Panics in its handler.
    #[cfg(test)]
    Panic,
}

/// What the router actor shows of itself.
#[derive(Debug, Clone, serde::Serialize)]
pub struct RouterState {
    /// Turns waiting for room.
    pub waiting: usize,
    /// Score queries sent so far.
    pub gathers: u64,
}

/// State of the router actor.
pub struct RouterActorState {
    shared: Arc<Shared>,
    round_robin: RoundRobin,
    queue: WaitQueue<TurnKey>,
    /// Everyone in the queue or woken from it, with the time it came.
    turns: std::collections::HashMap<TurnKey, (Waiting, Millis)>,
    /// Woken since room was freed last: not woken again before the others.
    woken: Vec<TurnKey>,
    /// How many of them found no room.
    vain: usize,
    started: Instant,
    gathers: u64,
    alarm: Option<Millis>,
}

/// See the module.
pub struct RouterActor;

impl Actor for RouterActor {
    type Msg = RouterMsg;
    type State = RouterActorState;
    type Arguments = Arc<Shared>;

    async fn pre_start(
        &self,
        myself: ActorRef<RouterMsg>,
        shared: Arc<Shared>,
    ) -> Result<RouterActorState, ActorProcessingErr> {
        let options = &shared.config.options;
        let queue = WaitQueue::new(options.queue_turns as usize, options.queue_deadline_ms);
        shared.install_router(myself);
        Ok(RouterActorState {
            shared,
            round_robin: RoundRobin::default(),
            queue,
            turns: std::collections::HashMap::new(),
            woken: Vec::new(),
            vain: 0,
            started: Instant::now(),
            gathers: 0,
            alarm: None,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<RouterMsg>,
        message: RouterMsg,
        state: &mut RouterActorState,
    ) -> Result<(), ActorProcessingErr> {
        fault_site!(crate::fault_lab::Site::Router(state.shared.config.instance));
        state.handle(message);
        state.set_alarm(&myself);
        fault_site!(crate::fault_lab::Site::Done("router"));
        Ok(())
    }
}

impl Drop for RouterActorState {
    fn drop(&mut self) {
        // Whoever waits here asks the next incarnation, the oldest first.
        let mut all: Vec<_> = self.turns.drain().collect();
        all.sort_by_key(|(key, (_, since))| (*since, *key));
    }
}

impl RouterActorState {
    fn handle(&mut self, message: RouterMsg) {
        match message {
            RouterMsg::Gather { session, chain, reply } => self.gather(&session, &chain, reply),
            RouterMsg::PickPrefill(reply) => {
                let p = self.round_robin.pick_prefill(&self.prefills(), &self.shared.config.options);
                reply.send(p);
            }
            RouterMsg::PickFallback(reply) => {
                let (p, d) = (self.prefills(), self.up(Role::Decode));
                reply.send(self.round_robin.pick_fallback(&p, &d, &self.shared.config.options));
            }
            RouterMsg::Wait(waiting) => self.wait(waiting),
            RouterMsg::Leave(key) => {
                self.queue.remove(&key);
                if let Some((waiting, _)) = self.turns.remove(&key) {
                    waiting.leaves();
                    self.wake_next();
                }
            }
            RouterMsg::RoomFreed => {
                // A turn whose session died while it was awake never says so.
                let (now, limit) = (self.now(), 2 * self.shared.config.options.queue_deadline_ms);
                self.turns.retain(|_, (_, since)| now.saturating_sub(*since) <= limit);
                self.woken.clear();
                self.vain = 0;
                self.wake_next();
            }
            RouterMsg::Deadline => {
                self.alarm = None;
                let now = self.now();
                for key in self.queue.expired(now) {
                    self.over(key);
                }
            }
            RouterMsg::Observe(reply) => {
                reply.send(RouterState { waiting: self.queue.len(), gathers: self.gathers });
            }
            #[cfg(test)]
            RouterMsg::Panic => panic!("asked to"),
        }
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    fn gather(&mut self, session: &SessionId, chain: &Arc<[BlockHash]>, reply: Reply<Fleet>) {
        self.gathers += 1;
        let workers = self.shared.workers();
        let up: Vec<_> = workers.iter().filter(|w| w.is_up()).collect();
        for (worker, slot) in up.iter().zip(gather::open(up.len(), reply)) {
            worker.cast(WorkerMsg::Score { session: session.clone(), chain: chain.clone(), slot });
        }
    }

    fn up(&self, role: Role) -> Vec<WorkerId> {
        let workers = self.shared.workers();
        workers.iter().filter(|w| w.role == role && w.is_up()).map(|w| w.at.id).collect()
    }

    fn prefills(&self) -> Vec<PrefillView> {
        let workers = self.shared.workers();
        let p = workers.iter().filter(|w| w.role == Role::Prefill && w.is_up());
        p.map(|w| PrefillView { id: w.at.id, backlog: w.backlog(), held: 0 }).collect()
    }

    fn wait(&mut self, waiting: Waiting) {
        let (key, work) = (waiting.turn, waiting.work);
        let again = self.turns.remove(&key).map(|(before, since)| (before.leaves(), since).1);
        let since = again.unwrap_or_else(|| self.now());
        let late = self.now().saturating_sub(since) >= self.shared.config.options.queue_deadline_ms;
        let pushed = match (late, again) {
            (true, _) => Pushed::Full,
            (false, None) => self.queue.push(key, &waiting.id, work, since),
            (false, Some(_)) => self.queue.back(key, &waiting.id, work, since),
        };
        match pushed {
            Pushed::Waits => {}
            Pushed::InPlaceOf(other) => self.over(other),
            Pushed::Full => {
                waiting.tell(TurnEvent::WaitOver);
                waiting.leaves();
                return;
            }
        }
        self.turns.insert(key, (waiting, since));
        if again.is_some() {
            self.vain += 1;
            // The others are no likelier to fit; each look costs a round of questions to the whole fleet.
            if self.vain < MAX_VAIN {
                self.wake_next();
            }
        }
    }

    /// Wakes the next turn that was not woken since room was freed last. It answers with `Wait` or `Leave`.
    fn wake_next(&mut self) {
        let now = self.now();
        while let Some(key) = self.queue.pop(now, |key| !self.woken.contains(key)) {
            self.woken.push(key);
            if self.turns.get(&key).is_some_and(|(waiting, _)| waiting.tell(TurnEvent::RoomFreed)) {
                return;
            }
            if let Some((waiting, _)) = self.turns.remove(&key) {
                waiting.leaves();
            }
        }
    }

    fn over(&mut self, key: TurnKey) {
        if let Some((waiting, _)) = self.turns.remove(&key) {
            waiting.tell(TurnEvent::WaitOver);
            waiting.leaves();
        }
    }

    fn set_alarm(&mut self, myself: &ActorRef<RouterMsg>) {
        let Some(at) = self.queue.next_deadline() else { return };
        if self.alarm.is_some_and(|set| set <= at) {
            return;
        }
        self.alarm = Some(at);
        let wait = Duration::from_millis(at.saturating_sub(self.now()));
        myself.send_after(wait, || RouterMsg::Deadline);
    }
}
