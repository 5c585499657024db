//! Restarts the router actor and the worker actors when they panic. Their counts live in the slots, their mirrors
//! are read anew, whoever waits for an answer gets one: a restart costs the messages of one mailbox.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::time::Instant;

use super::lost::Moved;
use super::router::{RouterActor, RouterMsg};
use super::shared::Shared;
use super::worker::{WorkerActor, WorkerArgs};
use crate::core::types::WorkerId;

const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// Messages of the supervisor.
pub enum SupervisorMsg {
    /// Start the actor of a worker that joined the fleet.
    Watch(WorkerId),
    /// Stop the actor of a worker and take it out of the fleet.
    Part(WorkerId),
    /// Forget old session records.
    Sweep,
}

/// What the supervisor needs.
pub struct SupervisorArgs {
    /// What all actors share.
    pub shared: Arc<Shared>,
    /// Counts restarts.
    pub restarts: Arc<AtomicU64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Child {
    Router,
    Worker(WorkerId),
}

/// State of the supervisor.
pub struct SupervisorState {
    args: SupervisorArgs,
    children: HashMap<ActorId, Child>,
}

/// See the module.
pub struct Supervisor;

impl Actor for Supervisor {
    type Msg = SupervisorMsg;
    type State = SupervisorState;
    type Arguments = SupervisorArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<SupervisorMsg>,
        args: SupervisorArgs,
    ) -> Result<SupervisorState, ActorProcessingErr> {
        let workers = args.shared.workers();
        let mut state = SupervisorState { args, children: HashMap::new() };
        state.start(&myself, Child::Router).await?;
        for worker in workers.iter() {
            state.start(&myself, Child::Worker(worker.at.id)).await?;
        }
        myself.send_interval(SWEEP_EVERY, || SupervisorMsg::Sweep);
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<SupervisorMsg>,
        message: SupervisorMsg,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            SupervisorMsg::Watch(id) => state.start(&myself, Child::Worker(id)).await?,
            SupervisorMsg::Part(id) => state.part(id),
            SupervisorMsg::Sweep => {
                let shared = &state.args.shared;
                if let Some(horizon) = Instant::now().checked_sub(shared.config.session_ttl) {
                    shared.book.sweep(horizon);
                    shared.lost.sweep(horizon);
                }
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<SupervisorMsg>,
        event: SupervisionEvent,
        state: &mut SupervisorState,
    ) -> Result<(), ActorProcessingErr> {
        let (who, why) = match event {
            SupervisionEvent::ActorFailed(who, error) => (who.get_id(), error.to_string()),
            SupervisionEvent::ActorTerminated(who, _, why) => (who.get_id(), why.unwrap_or_default()),
            _ => return Ok(()),
        };
        if let Some(child) = state.children.remove(&who) {
            state.args.restarts.fetch_add(1, Relaxed);
            match child {
                Child::Router => tracing::error!(why, "the router actor failed, restarting it"),
                Child::Worker(id) => tracing::error!(%id, why, "a worker actor failed, restarting it"),
            }
            state.start(&myself, child).await?;
        }
        Ok(())
    }
}

impl SupervisorState {
    fn part(&mut self, id: WorkerId) {
        let shared = &self.args.shared;
        let Some(slot) = shared.worker(id) else { return };
        shared.part(id);
        // Forgotten first: its end is no failure.
        self.children.retain(|_, child| *child != Child::Worker(id));
        if let Some(actor) = slot.actor() {
            actor.stop(None);
        }
        // Whatever still runs there is given up.
        slot.set_reachable(false);
        // It may have joined again under its URL.
        if !shared.workers().iter().any(|other| other.at.url == slot.at.url) {
            shared.transport.forget(&slot.at);
        }
        tracing::info!(worker = %slot.at.name, "a worker has left");
    }

    async fn start(
        &mut self,
        myself: &ActorRef<SupervisorMsg>,
        child: Child,
    ) -> Result<(), ActorProcessingErr> {
        let shared = &self.args.shared;
        let id = match child {
            Child::Router => {
                let (actor, _) =
                    Actor::spawn_linked(None, RouterActor, shared.clone(), myself.get_cell()).await?;
                actor.get_id()
            }
            Child::Worker(id) => {
                let Some(slot) = shared.worker(id) else { return Ok(()) };
                let (room, sync) = (shared.clone(), shared.clone());
                let args = WorkerArgs {
                    slot,
                    options: shared.config.options.clone(),
                    transport: shared.transport.clone(),
                    admit_timeout: shared.config.admit_timeout,
                    breaker: shared.config.breaker,
                    on_room: Arc::new(move || room.router(RouterMsg::RoomFreed)),
                    on_change: Arc::new(move |change| match change {
                        Moved::Dropped(dropped) => sync.lost(dropped),
                        Moved::Held(session) => sync.held(session),
                    }),
                };
                let (actor, _) = Actor::spawn_linked(None, WorkerActor, args, myself.get_cell()).await?;
                actor.get_id()
            }
        };
        self.children.insert(id, child);
        Ok(())
    }
}
