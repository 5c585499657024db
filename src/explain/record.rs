//! The record of one turn's decision: recorded states with or without the outcome they must lead to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::core::able::Able;
use crate::core::admit::AdmitTerms;
use crate::core::dispatch::RoundRobin;
use crate::core::ledger::LoadReport;
use crate::core::options::{Options, Preset};
use crate::core::route::Score;
use crate::core::turn::{Answer, Attempt};
use crate::core::types::{Mode, RejectReason, Tokens, WorkerId};

/// One case. Fields beyond the specification's are what a live gateway adds; absent means "not known".
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// Label.
    pub name: String,
    /// `preset` (absent = paper) and any option over it.
    pub settings: serde_json::Map<String, serde_json::Value>,
    /// Live: what the engines can do; absent = everything.
    #[serde(default)]
    pub able: Able,
    /// The D workers, in the order of their ids.
    pub workers: Vec<WorkerRecord>,
    /// The P workers' names.
    pub prefill: Vec<String>,
    /// Live: prompt tokens queued at each P, in the order of `prefill`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefill_backlog: Vec<Tokens>,
    /// Live: tokens of this prompt each P holds, in the order of `prefill`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefill_held: Vec<Tokens>,
    /// Live: where the round robins stood, as places in `prefill` and `workers`.
    #[serde(default)]
    pub round_robin: RoundRobin,
    /// The session before the turn.
    pub session: SessionRecord,
    /// The turn.
    pub request: RequestRecord,
    /// What must come out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Expect>,
}

/// A D worker's state.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// Name.
    pub id: String,
    /// `K_d` in tokens.
    pub k_d: Tokens,
    /// `resident[d]`.
    #[serde(default)]
    pub resident: Vec<u64>,
    /// Resident sessions and their tokens.
    #[serde(default)]
    pub sessions: BTreeMap<String, Tokens>,
    /// `inflight[d]`.
    pub inflight: u32,
    /// `assigned[d]`.
    pub assigned: u64,
    /// Live: `overlap(d)` as the mirror counted it, instead of `resident`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<u32>,
    /// Live: last load report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<LoadReport>,
    /// Live: tokens of the live sessions pinned here.
    #[serde(default)]
    pub pinned_tokens: Tokens,
    /// Live: the backup it could be given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<BackupRecord>,
    /// Live: ramp.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm: Option<f64>,
    /// Live: what Admit decided from, if it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terms: Option<AdmitTerms>,
    /// Live: Admit was asked and did not answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unreachable: bool,
}

/// KV outside a D's pool that continues what it holds of the prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupRecord {
    /// Tokens behind its own prefix.
    pub tokens: Tokens,
    /// The P; absent = its own host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
}

/// The session before the turn.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SessionRecord {
    /// `s(r)`.
    pub id: String,
    /// `t(r)`.
    pub turn: u32,
    /// `pin[s]`.
    pub pin: Option<String>,
    /// `rejects[s, d]`.
    #[serde(default)]
    pub rejects: BTreeMap<String, u32>,
}

/// The turn.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RequestRecord {
    /// `prefix_hashes(r)`.
    #[serde(default)]
    pub prefix_hashes: Vec<u64>,
    /// `append_len(r)` in tokens.
    pub append_len: Tokens,
    /// Live: `input_len(r)`; absent = `|prefix_hashes| · block + append_len`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_len: Option<Tokens>,
    /// Live: output tokens reserved.
    #[serde(default)]
    pub output_reserve: Tokens,
    /// Live: the turn came back from the wait queue past its deadline.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waited: bool,
}

/// What a case must lead to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Expect {
    /// One per pass of Algorithm 3's loop.
    pub attempts: Vec<AttemptRecord>,
    /// How it ends.
    pub outcome: OutcomeRecord,
    /// Σ right after lines 8-10, 21 or 26-27.
    pub after: AfterRecord,
}

/// One pass of the loop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttemptRecord {
    /// `d*`.
    pub worker: String,
    /// The candidates' 4-tuples.
    pub scores: BTreeMap<String, [i64; 4]>,
    /// Algorithm 2's answer.
    pub can_admit: bool,
    /// Its mode.
    pub mode: Option<Mode>,
    /// Its reason.
    pub reason: Option<RejectReason>,
}

impl AttemptRecord {
    /// The record of one pass, with the workers' names.
    pub fn of(attempt: &Attempt, name: impl Fn(WorkerId) -> String) -> Self {
        let (can_admit, mode, reason) = match attempt.answer {
            Some(Answer::Admitted { mode, .. }) => (true, Some(mode), None),
            Some(Answer::Rejected { reason, .. }) => (false, None, Some(reason)),
            _ => (false, None, None),
        };
        let tuple = |Score(a, b, c, d): Score| [a, b, c, d];
        Self {
            worker: name(attempt.choice.worker),
            scores: attempt.choice.scores.iter().map(|(d, score)| (name(*d), tuple(*score))).collect(),
            can_admit,
            mode,
            reason,
        }
    }
}

/// How a turn ends: a mode, or `wait`, `too-large`, `no-capacity`, `no-workers`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeRecord {
    /// Lower case.
    pub mode: String,
    /// P.
    pub prefill: Option<String>,
    /// D.
    pub decode: Option<String>,
    /// Live: the rung.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rung: Option<crate::core::types::Rung>,
}

/// Σ afterwards. `rejects` leaves out zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AfterRecord {
    /// `pin[s]`.
    pub pin: Option<String>,
    /// `rejects[s, ·]`.
    pub rejects: BTreeMap<String, u32>,
    /// `inflight[d]`.
    pub inflight: BTreeMap<String, u32>,
    /// `assigned[d]`.
    pub assigned: BTreeMap<String, u64>,
}

impl Record {
    /// The options the case runs under.
    ///
    /// # Errors
    /// Names the key and what is wrong with it.
    pub fn options(&self) -> Result<Options, String> {
        let mut settings = self.settings.clone();
        let preset = match settings.remove("preset") {
            None => Preset::Paper,
            Some(value) => serde_json::from_value(value).map_err(|e| format!("settings.preset: {e}"))?,
        };
        let base = serde_json::to_value(Options::preset(preset)).map_err(|e| e.to_string())?;
        let serde_json::Value::Object(mut all) = base else { return Err("options are no object".into()) };
        all.extend(settings);
        let options: Options = serde_json::from_value(all.into()).map_err(|e| format!("settings: {e}"))?;
        match options.invalid() {
            Some((key, value, allowed)) => Err(format!("settings.{key} = {value}: allowed is {allowed}")),
            None => Ok(options),
        }
    }
}
