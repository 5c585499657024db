//! Workers that come and go while turns run. An id belongs to one worker for ever; one that leaves gets no new turn,
//! its sessions move with their next turn, and what runs there ends first.

use std::sync::Arc;
use std::time::Duration;

use super::api::WorkerRef;
use super::handle::{TurnRouter, WorkerSpec};
use super::router::RouterMsg;
use super::slot::{Role, WorkerSlot};
use super::supervisor::SupervisorMsg;
use super::worker::WorkerState;
use crate::core::types::WorkerId;

/// Why a worker cannot join.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// Another worker has its name.
    #[error("there is a worker `{0}` already")]
    Name(String),
    /// It is in the fleet.
    #[error("the worker at this URL is in the fleet already, as `{0}`")]
    Url(String),
}

impl TurnRouter {
    /// A worker joins; its actor connects in the background. Without a name it gets one that was never used.
    ///
    /// # Errors
    /// Its name or its URL is taken.
    pub fn add_worker(
        &self,
        url: &str,
        role: Role,
        name: Option<String>,
    ) -> Result<Arc<WorkerSlot>, JoinError> {
        let _one_at_a_time = self.fleet_lock();
        let workers = self.shared.workers();
        if let Some(known) = workers.iter().find(|w| *w.at.url == *url && w.role == role && !w.is_leaving()) {
            return Err(JoinError::Url(known.at.name.to_string()));
        }
        if let Some(name) = name.as_ref().filter(|name| workers.iter().any(|w| *w.at.name == ***name)) {
            return Err(JoinError::Name(name.clone()));
        }
        let id = self.shared.next_worker();
        let name = name.unwrap_or_else(|| free_name(role, id, &workers));
        let slot = new_slot(id, WorkerSpec { name, url: url.to_owned(), role });
        tracing::info!(worker = %slot.at.name, ?role, "a worker joins");
        self.shared.join(&slot);
        let _ = self.supervisor.cast(SupervisorMsg::Watch(id));
        Ok(slot)
    }

    /// A worker leaves when what runs there has ended, after `limit` at the latest. `false`: no such worker.
    pub fn remove_worker(&self, name: &str, limit: Duration) -> bool {
        let Some(slot) = self.slot_named(name) else { return false };
        if slot.leave() {
            tracing::info!(worker = %slot.at.name, "a worker leaves");
        }
        self.shared.router(RouterMsg::RoomFreed);
        let supervisor = self.supervisor.clone();
        tokio::spawn(async move {
            let _ = tokio::time::timeout(limit, slot.idle()).await;
            let _ = supervisor.cast(SupervisorMsg::Part(slot.at.id));
        });
        true
    }

    /// Stops or resumes sending new turns to a worker. `false`: no worker of that name.
    pub fn drain(&self, name: &str, draining: bool) -> bool {
        let Some(slot) = self.slot_named(name) else { return false };
        slot.set_draining(draining);
        // Who waits for room there asks elsewhere, or asks there again.
        self.shared.router(RouterMsg::RoomFreed);
        true
    }

    /// The state of one worker.
    pub async fn worker(&self, name: &str) -> Option<WorkerState> {
        self.workers().await.into_iter().find(|state| state.name == name)
    }

    /// The name of the worker at a URL.
    pub fn name_of(&self, url: &str, role: Role) -> Option<String> {
        let workers = self.shared.workers();
        workers
            .iter()
            .find(|w| *w.at.url == *url && w.role == role && !w.is_leaving())
            .map(|w| w.at.name.to_string())
    }

    fn slot_named(&self, name: &str) -> Option<Arc<WorkerSlot>> {
        self.shared.workers().iter().find(|w| &*w.at.name == name).cloned()
    }
}

/// The slot of a worker that joins.
pub(super) fn new_slot(id: WorkerId, spec: WorkerSpec) -> Arc<WorkerSlot> {
    let (name, url) = (spec.name.into(), spec.url.into());
    let at = WorkerRef { id, role: spec.role, name, url, kv_addr: None };
    WorkerSlot::new(at, spec.role)
}

fn free_name(role: Role, id: WorkerId, workers: &[Arc<WorkerSlot>]) -> String {
    let letter = if role == Role::Prefill { 'p' } else { 'd' };
    // Somebody may have given such a name by hand.
    let names = std::iter::once(format!("{letter}{}", id.0))
        .chain((1..).map(|more| format!("{letter}{}-{more}", id.0)));
    let taken = |name: &String| workers.iter().any(|w| *w.at.name == **name);
    names.into_iter().find(|name| !taken(name)).unwrap_or_default()
}
