//! What the gateway asks of the rooms below it. One seam, so that the gateway is tested with scripted
//! placements and an embedder can bring its own.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use actix_web::http::header::HeaderMap;
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use serde_json::Value;

use super::errors::ApiError;
use super::hint::Hint;
use super::observe::Observed;
use crate::actors::api::{DispatchPlan, Failure, Refusal, TurnResult, WorkerRef};
use crate::actors::gate::{Gate, Permit};
use crate::actors::slot::Role;
use crate::keeper::handback::HandBack;
use crate::settings::Settings;
use crate::wire::plan::Report;

/// A request to place.
#[derive(Debug, Clone, Copy)]
pub struct Incoming<'a> {
    /// Path of the API, e.g. `/v1/chat/completions`.
    pub path: &'static str,
    /// The client's headers.
    pub headers: &'a HeaderMap,
    /// The client's body, whole.
    pub body: &'a Bytes,
    /// The chat body that workers get in its place, when their engine doesn't speak the client's API.
    pub sent: Option<&'a Bytes>,
    /// Where the client says its turn was.
    pub hint: Option<Hint<'a>>,
    /// Whether the decision is to be recorded.
    pub explain: bool,
}

/// Sessions and actors, as the gateway sees them. Cheap to clone: each serving thread has one.
pub trait Backend: Clone + Send + 'static {
    /// A placed turn.
    type Turn: Turn;

    /// The gate requests pass before their bodies are read.
    fn gate(&self) -> &Arc<Gate>;

    /// Finds out whose turn this is and places it. The turn keeps its place at the gate. Dropping the future withdraws
    /// the request.
    ///
    /// # Errors
    /// What the client is told: 400 for a body that cannot be routed, 404 for an unknown model, or a refusal.
    fn place(
        &self,
        incoming: Incoming<'_>,
        permit: Permit,
    ) -> impl Future<Output = Result<Self::Turn, ApiError>>;

    /// Tokens of a prompt as far as the gateway knows, for engines that cannot be asked.
    ///
    /// # Errors
    /// 400 for a body that cannot be read.
    fn count(&self, incoming: Incoming<'_>) -> Result<u64, ApiError>;

    /// A D for a request that is nobody's turn: the least busy one, or the `nth` after it.
    fn anyone(&self, nth: usize) -> Option<WorkerRef>;

    /// Whether requests can be served: at least one D is up and the gateway is not draining.
    fn ready(&self) -> bool;

    /// Names of the models the workers serve.
    fn models(&self) -> Vec<String>;

    /// Observable state of the sessions, for `/admin/sessions`.
    fn sessions(&self) -> impl Future<Output = Value>;

    /// Observable state of the workers, for `/admin/workers`.
    fn workers(&self) -> impl Future<Output = Value>;

    /// What `/metrics` shows of the moment, as Prometheus text: the workers.
    fn metrics(&self) -> impl Future<Output = String> {
        std::future::ready(String::new())
    }

    /// Changes the fleet. Answers what `/admin/workers` shows of the worker from now on.
    ///
    /// # Errors
    /// 404 for an unknown worker, 409 for one that is known already.
    fn change(&self, change: FleetChange) -> impl Future<Output = Result<Value, ApiError>> {
        let _ = change;
        std::future::ready(Err(ApiError::not_found()))
    }

    /// Takes over the settings that may change while it runs.
    fn adopt(&self, old: &Settings, new: &Settings) {
        let _ = (old, new);
    }

    /// A recorded decision as the list `explain` reads, for `/admin/explain/NAME`.
    fn record(&self, name: &str) -> Option<Value> {
        let _ = name;
        None
    }
}

/// A change of the fleet while turns run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FleetChange {
    /// A worker joins.
    Add {
        /// Its base URL.
        url: String,
        /// P or D.
        role: Role,
        /// Its name; chosen when absent.
        name: Option<String>,
    },
    /// A worker leaves when what runs there has ended, `within` at the latest.
    Remove {
        /// Its name.
        name: String,
        /// Longest wait for what runs there.
        within: Duration,
    },
    /// A worker takes no new turns, or takes them again.
    Drain {
        /// Its name.
        name: String,
        /// Whether it takes none.
        draining: bool,
    },
}

/// A placed turn. Dropped without [`Turn::finished`] it counts as cancelled: lease and inflight are returned.
pub trait Turn: Sized + Unpin + 'static {
    /// How to execute it.
    fn plan(&self) -> &DispatchPlan;

    /// Name of the decision's record, if one was made.
    fn record(&self) -> Option<&str> {
        None
    }

    /// The P has done its part, while D goes on.
    fn prefill_done(&self) {}

    /// Its D says what it did; before the first byte is passed on.
    fn reported(&self, report: Report) {
        let _ = report;
    }

    /// Its answer is complete as far as the client can tell, and its last bytes are about to be passed on.
    fn complete(&self, observed: &Observed) {
        let _ = observed;
    }

    /// What its D may hand back to a P, once it is complete.
    fn hand_backs(&self) -> Vec<HandBack> {
        Vec::new()
    }

    /// Waits until one of its workers stops to answer: connections to a frozen worker don't break.
    fn lost(&self) -> LocalBoxFuture<'static, Failure> {
        Box::pin(std::future::pending())
    }

    /// Places it anew after a failure; nothing has reached the client yet.
    ///
    /// # Errors
    /// Nobody else can take it.
    fn failed(self, failure: Failure) -> impl Future<Output = Result<Self, Refusal>>;

    /// It was served to its end.
    fn finished(self, observed: Observed);

    /// Its worker broke off in the middle of its answer, or (`error`) answered with an error of its own: 5xx, or an
    /// error in the stream. The default treats it as cancelled.
    fn broken(self, error: bool) {
        let _ = error;
        drop(self);
    }
}

impl From<&Observed> for TurnResult {
    fn from(seen: &Observed) -> Self {
        Self {
            prompt_tokens: seen.prompt_tokens,
            completion_tokens: seen.completion_tokens,
            cached_tokens: seen.cached_tokens,
            stop: seen.stop,
        }
    }
}
