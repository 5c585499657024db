//! The policies of the field and ours, on one fleet.

mod baseline;
mod dp_cache_aware;
mod dp_kv_cost;
mod dp_lmetric;
mod dp_lpwl;
mod dp_round_robin;
mod dp_sticky;
mod kvc;
mod pd_conditional;
mod pd_once;
mod pd_round_robin;
mod ppd;

use super::settings::Setting;
use super::sim::fleet::Fleet;
use super::sim::job::JobId;
use crate::core::options::{D2pTrigger, Options, Reserve};
use crate::core::turn::Refused;

pub use baseline::{Baseline, Choose, Route, View, WorkerView};
pub use kvc::Kvc;

/// A policy at work: told what happens, it dispatches turns on the fleet.
pub trait Router: std::fmt::Debug {
    /// A turn arrived (or came back after a 429).
    fn arrive(&mut self, fleet: &mut Fleet, job: JobId);
    /// A turn is complete.
    fn done(&mut self, fleet: &mut Fleet, job: JobId);
    /// A worker released room.
    fn freed(&mut self, fleet: &mut Fleet, worker: usize);
    /// The deadline of a turn in the wait queue.
    fn deadline(&mut self, fleet: &mut Fleet, job: JobId);
    /// Turns refused since the last call.
    fn take_refused(&mut self) -> Vec<(JobId, Refused)>;
    /// Moves the turn's session made so far are counted by the fleet; this is the wait queue's length.
    fn waiting(&self) -> usize {
        0
    }
}

/// A policy of the list.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Its name on the command line and in reports.
    pub name: &'static str,
    /// Whether it runs on fused workers.
    pub fused: bool,
    build: fn(&Setting) -> Box<dyn Router>,
    options: fn(&Setting) -> Options,
}

const fn ours(
    name: &'static str,
    fused: bool,
    build: fn(&Setting) -> Box<dyn Router>,
    options: fn(&Setting) -> Options,
) -> Policy {
    Policy { name, fused, build, options }
}

/// A policy that only chooses workers; `pd-*` run on P and D, `dp-*` on fused workers.
const fn field(name: &'static str, fused: bool, build: fn(&Setting) -> Box<dyn Router>) -> Policy {
    Policy { name, fused, build, options: engine }
}

fn chooser<C: Choose + Default + 'static>(_: &Setting) -> Box<dyn Router> {
    Box::new(Baseline::new(C::default()))
}

/// All policies, in the order of reports.
pub static POLICIES: [Policy; 13] = [
    ours("kvc", false, |s| Box::new(Kvc::new(s.kvc.clone(), s)), |s| s.kvc.clone()),
    ours("kvc-paper", false, |s| Box::new(Kvc::new(s.paper.clone(), s)), |s| s.paper.clone()),
    ours("kvc-fused", true, |s| Box::new(Kvc::new(s.kvc.clone(), s)), |s| s.kvc.clone()),
    field("pd-round-robin", false, chooser::<pd_round_robin::PdRoundRobin>),
    field("pd-conditional", false, chooser::<pd_conditional::PdConditional>),
    field("pd-once", false, chooser::<pd_once::PdOnce>),
    field("ppd", false, chooser::<ppd::Ppd>),
    field("dp-round-robin", true, chooser::<dp_round_robin::DpRoundRobin>),
    field("dp-sticky", true, chooser::<dp_sticky::DpSticky>),
    field("dp-cache-aware", true, chooser::<dp_cache_aware::DpCacheAware>),
    field("dp-lpwl", true, chooser::<dp_lpwl::DpLpwl>),
    field("dp-lmetric", true, chooser::<dp_lmetric::DpLmetric>),
    field("dp-kv-cost", true, chooser::<dp_kv_cost::DpKvCost>),
];

/// How an engine without our admission keeps its pool: LRU, oracle output lengths, no ρ.
fn engine(setting: &Setting) -> Options {
    Options { block_tokens: setting.block, rho: 1.0, d2p_trigger: D2pTrigger::Off, ..Options::production() }
}

impl Policy {
    /// The policy of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        POLICIES.iter().find(|p| p.name == name)
    }

    /// Whether it is one of ours: its own admission and queue.
    pub fn ours(&self) -> bool {
        self.name.starts_with("kvc")
    }

    /// A fresh router.
    pub fn router(&self, setting: &Setting) -> Box<dyn Router> {
        (self.build)(setting)
    }

    /// A fresh fleet.
    pub fn fleet(&self, setting: &Setting) -> Fleet {
        let (p, d) = match self.fused {
            true => (0, setting.prefill + setting.decode),
            false => (setting.prefill, setting.decode),
        };
        let mut lab = setting.lab.clone();
        lab.plain_lru |= !self.ours();
        let options = (self.options)(setting);
        let room_first = self.ours() && options.reserve == Reserve::Lease;
        let mut fleet =
            Fleet::new(p as usize, d as usize, setting.kv_tokens, options, setting.cost.clone(), lab);
        fleet.room_first = room_first;
        fleet
    }
}

/// The policies of a comma-separated list, or `all`.
///
/// # Errors
/// The unknown name and the known ones.
pub fn list(text: &str) -> Result<Vec<&'static Policy>, String> {
    if text == "all" {
        return Ok(POLICIES.iter().collect());
    }
    let mut found = Vec::new();
    for name in text.split(',').map(str::trim).filter(|n| !n.is_empty()) {
        let policy = Policy::named(name).ok_or_else(|| {
            let known: Vec<&str> = POLICIES.iter().map(|p| p.name).collect();
            format!("unknown policy {name:?}; known: all, {}", known.join(", "))
        })?;
        if !found.iter().any(|p: &&Policy| p.name == policy.name) {
            found.push(policy);
        }
    }
    if found.is_empty() { Err("no policy named".into()) } else { Ok(found) }
}
