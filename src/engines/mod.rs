//! How a placed turn is executed at its workers, for each kind of engine. Knows nothing of sessions or placement.
//! Nothing outside this room asks which kind an engine is: it asks for [`Capabilities`].
//!
//! - [`Engine`]: one fleet's engines. [`kind`]: the kinds; [`reading`]: what they say of themselves.
//! - [`builtin`], `openai`, `vllm` (with `mooncake`), `sglang`: the legs of a turn at each; `pair`: two legs at once.
//! - [`client`]: HTTP/1.1 to workers, one connection pool per serving thread; [`fetch`]: small questions.
//! - [`control`]: Admit, leases and events at nodes, for the worker actors. [`outbound`]: the client of both.
//! - [`tls`]: rustls set-up of all of them, and of the gateway's listener.

pub mod answer;
pub mod builtin;
pub mod client;
pub mod control;
pub mod fetch;
pub mod kind;
pub mod outbound;
pub mod reading;
pub mod tls;

mod mooncake;
mod openai;
mod pair;
mod sglang;
mod vllm;

#[cfg(test)]
pub(crate) mod fake;

pub use kind::{Capabilities, EngineKind};

use std::collections::HashMap;

use bytes::Bytes;

use crate::actors::api::DispatchPlan;
use crate::prompt::{members, rewrite};
use crate::wire::admit::AdmitHead;
use crate::wire::plan::{Continue, PLAN_HEADER, Plan, Push};
use answer::{Answer, Trouble};
use client::{Client, Request};
use fetch::{Fetch, Unwell};
use reading::{At, Pulse, Reading};

/// The engines of a fleet and how they were set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    /// Their kind.
    pub kind: EngineKind,
    /// A `kvc-router node` stands before each: it is told which leg of which turn a request is.
    pub nodes: bool,
    /// D workers append to what they hold though their kind does not (SGLang with this project's plugin).
    pub appends: bool,
    /// vLLM with its Mooncake connector: the bootstrap server of each P, by P's base URL.
    pub mooncake: HashMap<String, String>,
}

/// A P and a D.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair<'a> {
    /// D's base URL.
    pub decode: &'a str,
    /// P's.
    pub prefill: &'a str,
    /// Where P meets D workers ([`Reading::meets`]).
    pub meets: Option<&'a str>,
}

/// How a handing back went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handed {
    /// P holds the prompt's KV.
    Stored,
    /// D gives no handles: it was not started for this.
    NoHandles,
    /// One of the two failed.
    Failed,
}

impl Handed {
    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::NoHandles => "no_handles",
            Self::Failed => "failed",
        }
    }
}

/// The body without these members; one that has none of them passes byte for byte.
fn without<const N: usize>(body: &Bytes, names: [&str; N]) -> Bytes {
    match members(body, names).iter().all(Option::is_none) {
        true => body.clone(),
        false => rewrite(body, &[], &names).map_or_else(|_| body.clone(), Bytes::from),
    }
}

/// Headers of a turn's legs.
struct Legs {
    decode: Vec<(&'static str, String)>,
    prefill: Vec<(&'static str, String)>,
}

impl Engine {
    /// Engines of a kind as they come.
    pub fn stock(kind: EngineKind) -> Self {
        Self { kind, nodes: false, appends: false, mooncake: HashMap::new() }
    }

    /// What they can do.
    pub fn capabilities(&self) -> Capabilities {
        let mut found = self.kind.capabilities();
        found.able.direct |= self.appends;
        found.able.local |= self.appends;
        // Mooncake's connector sends KV from P to D only.
        found.d2p &= self.mooncake.is_empty();
        found
    }

    /// Whether the scheduler of the engine at `url` has room for the append of a Direct turn that the books have
    /// admitted. Engines without a say of their own agree.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn admits(&self, fetch: &Fetch, url: &str, asked: &AdmitHead) -> Result<bool, Unwell> {
        match self.appends {
            true => sglang::admits(fetch, url, asked).await,
            false => Ok(true),
        }
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
        let legs = self.legs(plan);
        match self.kind {
            EngineKind::Builtin => builtin::execute(client, plan, request, prefill_done).await,
            EngineKind::Openai => openai::execute(client, plan, request, &legs).await,
            EngineKind::Vllm => vllm::execute(client, plan, request, &legs, prefill_done).await,
            EngineKind::Sglang => sglang::execute(client, plan, request, &legs, prefill_done).await,
        }
    }

    /// The request for the rest of an answer that another worker began; `None`: they cannot do that.
    pub fn continued(&self, request: &Request, begun: &Continue) -> Option<Request> {
        self.capabilities().continues.then(|| builtin::continued(request, begun)).flatten()
    }

    /// Whether its D hands KV back to a P when asked.
    pub fn hands_back(&self) -> bool {
        let capabilities = self.capabilities();
        capabilities.d2p && !capabilities.admits && !self.nodes
    }

    /// Hands what `decode` holds of a prompt it has just answered to the P at `prefill`.
    pub async fn hand_back(
        &self,
        client: &Client,
        request_id: &str,
        request: &Request,
        (decode, prefill): (&str, &str),
    ) -> Handed {
        match self.kind {
            EngineKind::Vllm => vllm::hand_back(client, request_id, request, (decode, prefill)).await,
            EngineKind::Builtin | EngineKind::Sglang | EngineKind::Openai => Handed::NoHandles,
        }
    }

    /// Lets a P and a D make each other's acquaintance, so that no turn has to wait for it.
    ///
    /// # Errors
    /// What went wrong, for people.
    pub async fn introduce(&self, fetch: &Fetch, model: &str, pair: Pair<'_>) -> Result<(), String> {
        match self.kind {
            EngineKind::Vllm => vllm::introduce(fetch, model, pair).await,
            EngineKind::Builtin | EngineKind::Sglang | EngineKind::Openai => Ok(()),
        }
    }

    fn legs(&self, plan: &DispatchPlan) -> Legs {
        let id = ("x-request-id", plan.request_id.clone());
        let mut legs = Legs { decode: vec![id.clone()], prefill: vec![id] };
        if self.nodes {
            let request_id = plan.request_id.clone();
            let push =
                Push { transfer_id: request_id.clone(), to: String::new(), from_block: plan.reuse_blocks };
            let prefill = Plan::Prefill { request_id, session: plan.session.clone(), push };
            legs.decode.push((PLAN_HEADER, builtin::header_json(&builtin::decode_plan(plan))));
            legs.prefill.push((PLAN_HEADER, builtin::header_json(&prefill)));
        }
        legs
    }

    /// What the engine at `url` is.
    ///
    /// # Errors
    /// It is not up, or not what it must be.
    pub async fn read(&self, fetch: &Fetch, url: &str) -> Result<Reading, Unwell> {
        let at = At { fetch, url };
        match self.kind {
            EngineKind::Vllm => {
                let mut reading = reading::vllm(at).await?;
                if let Some(bootstrap) = self.mooncake.get(url) {
                    let id = mooncake::engine_id(fetch, bootstrap).await?;
                    reading.meets = Some(mooncake::meeting(&id, bootstrap));
                }
                Ok(reading)
            }
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
