//! How a placed turn is executed at its workers, for each kind of engine. Knows nothing of sessions or placement.
//! Nothing outside this room asks which kind an engine is: it asks for [`Capabilities`].
//!
//! - [`Engine`]: one fleet's engines. [`kind`]: the kinds; [`reading`]: what they say of themselves.
//! - [`builtin`], `openai`, `vllm`, `sglang`: the legs of a turn at each.
//! - [`client`]: HTTP/1.1 to workers, one connection pool per serving thread; [`fetch`]: small questions.
//! - [`control`]: Admit, leases and events at nodes, for the worker actors.

pub mod answer;
pub mod builtin;
pub mod client;
pub mod control;
pub mod fetch;
pub mod kind;
pub mod reading;

mod openai;
mod sglang;
mod vllm;

#[cfg(test)]
pub(crate) mod fake;

pub use kind::{Capabilities, EngineKind};

use crate::actors::api::DispatchPlan;
use answer::{Answer, Trouble};
use client::{Client, Request};
use fetch::{Fetch, Unwell};
use reading::{At, Pulse, Reading};

/// The engines of a fleet and how they were set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// Their kind.
    pub kind: EngineKind,
}

impl Engine {
    /// What they can do.
    pub fn capabilities(&self) -> Capabilities {
        self.kind.capabilities()
    }

    /// Executes `plan` with the client's `request`. Dropping the future closes the connections of all legs.
    /// `prefill_done` is called when P has done its part; D may take much longer.
    ///
    /// An answer may have any status: an engine's own refusal of the request is an answer.
    ///
    /// # Errors
    /// [`Trouble`]; all legs are closed then.
    pub async fn execute(
        &self,
        client: &Client,
        plan: &DispatchPlan,
        request: &Request,
        prefill_done: impl FnOnce(),
    ) -> Result<Answer, Trouble> {
        match self.kind {
            EngineKind::Builtin => builtin::execute(client, plan, request, prefill_done).await,
            EngineKind::Openai => openai::execute(client, plan, request).await,
            EngineKind::Vllm => vllm::execute(client, plan, request, prefill_done).await,
            EngineKind::Sglang => sglang::execute(client, plan, request, prefill_done).await,
        }
    }

    /// What the engine at `url` is.
    ///
    /// # Errors
    /// It is not up, or not what it must be.
    pub async fn read(&self, fetch: &Fetch, url: &str) -> Result<Reading, Unwell> {
        let at = At { fetch, url };
        match self.kind {
            EngineKind::Vllm => reading::vllm(at).await,
            EngineKind::Sglang => reading::sglang(at).await,
            _ => reading::openai(at).await,
        }
    }

    /// How the engine at `url` does.
    ///
    /// # Errors
    /// It is not up.
    pub async fn pulse(&self, fetch: &Fetch, url: &str) -> Result<Pulse, Unwell> {
        let at = At { fetch, url };
        match self.kind {
            EngineKind::Vllm => reading::vllm_pulse(at).await,
            EngineKind::Sglang => reading::sglang_pulse(at).await,
            _ => reading::openai_pulse(at).await,
        }
    }
}
