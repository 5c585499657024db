//! What a seed means: a fleet, clients, and what goes wrong when.

use std::time::Duration;

use kvc_router::core::options::{D2pTarget, D2pTrigger, Options};
use kvc_router::fault_lab::Act;
use kvc_router::prompt::Api;

use super::dice::{Msg, Rng};
use super::net::{Action, Host, Kind};

/// When a client leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    Never,
    /// So long after it asked, if the answer has not begun.
    Before(Duration),
    /// After so many pieces of its answer.
    Within(usize),
}

/// What a turn is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// The conversation grows.
    Append,
    /// The conversation is rewritten: what was said becomes a summary.
    Compact,
    /// A sub-agent's turn: the same system prompt, another conversation.
    Sub,
    /// A side request.
    Side,
}

/// One request of a client.
#[derive(Debug, Clone, Copy)]
pub struct TurnPlan {
    /// Rest before it.
    pub rest: Duration,
    pub sort: Sort,
    /// Bytes that are new in its prompt.
    pub bytes: usize,
    pub max_tokens: u64,
    pub stream: bool,
    pub leave: Leave,
    /// The client does not wait for the one before.
    pub parallel: bool,
    pub gateway: usize,
    pub api: Api,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Schedule {
    pub seed: u64,
    pub options: Options,
    pub prefills: usize,
    pub decodes: usize,
    pub k_d: u64,
    pub gateways: usize,
    pub latency: Duration,
    pub time_scale: f64,
    pub host_tokens: u64,
    pub rates: [u64; 7],
    pub at_messages: Vec<(u64, Action)>,
    pub at_times: Vec<(Duration, Action)>,
    pub sessions: Vec<Vec<TurnPlan>>,
    /// Bytes of the system prompt all sessions share.
    pub shared: usize,
    pub max_inflight: usize,
    /// How long a node lets a forced turn wait, and how many.
    pub node_queue: (Duration, usize),
    /// Many long turns at once on small pools.
    pub crowded: bool,
    /// Broken streams go on at another worker.
    pub resume: bool,
    /// Clients come when the fleet is up, not in the middle of its start.
    pub ready: bool,
    /// What each session speaks.
    pub apis: Vec<Api>,
}

impl Schedule {
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 0x5eed);
        let (prefills, decodes) = (rng.range(0, 3) as usize, rng.range(1, 5) as usize);
        let gateways = 1 + usize::from(rng.chance(25));
        let options = options(&mut rng, prefills);
        let crowded = rng.chance(35);
        let blocks = if crowded { rng.range(24, 60) } else { rng.range(24, 110) };
        let calm = rng.chance(8) && Lean::of(seed) == Lean::None;
        let mut schedule = Self {
            seed,
            prefills,
            decodes,
            k_d: blocks * 24 + rng.range(0, 24),
            gateways,
            latency: Duration::from_micros(rng.range(50, 3000)),
            time_scale: if crowded { *rng.pick(&[0.05, 0.1, 0.3]) } else { *rng.pick(&[0.5, 1.0, 4.0]) },
            host_tokens: rng.range(0, 3) * blocks * 24,
            rates: rates(&mut rng, calm),
            at_messages: Vec::new(),
            at_times: Vec::new(),
            sessions: Vec::new(),
            shared: rng.range(1, 12) as usize * 96,
            max_inflight: if rng.chance(10) { 3 } else { 64 },
            node_queue: (rng.ms(300, 8000), *rng.pick(&[1, 2, 256])),
            crowded,
            resume: rng.chance(50),
            ready: seed.is_multiple_of(2),
            apis: Vec::new(),
            options,
        };
        let lean = Lean::of(seed);
        lean.before(&mut rng, &mut schedule);
        let sessions = if schedule.crowded { rng.range(3, 7) } else { rng.range(1, 4) } as usize;
        schedule.apis = (0..sessions).map(|_| api(&mut rng)).collect();
        schedule.sessions = schedule.apis.iter().map(|api| session(&mut rng, &schedule, *api)).collect();
        lean.after(&mut rng, &mut schedule);
        if !calm && lean == Lean::None {
            for _ in 0..rng.range(0, 5) {
                let action = action(&mut rng, &schedule);
                if rng.chance(75) {
                    schedule.at_messages.push((rng.range(5, 220), action));
                } else {
                    schedule.at_times.push((rng.ms(0, 6000), action));
                }
            }
        }
        schedule.at_times.sort_by_key(|(at, _)| *at);
        schedule.ready |= schedule.is_calm();
        schedule
    }

    /// Whether nothing goes wrong in it.
    pub fn is_calm(&self) -> bool {
        self.rates == [0; 7] && self.at_messages.is_empty() && self.at_times.is_empty()
    }
}

fn options(rng: &mut Rng, prefills: usize) -> Options {
    let mut options = if rng.chance(70) { Options::production() } else { Options::paper() };
    options.tau_append = rng.range(4, 24) * 24;
    options.rho = *rng.pick(&[0.8, 0.95, 1.0]);
    options.lease_ms = *rng.pick(&[1500, 4000, 10_000]);
    options.queue_deadline_ms = *rng.pick(&[500, 2000, 6000]);
    options.queue_turns = *rng.pick(&[1, 4, 256]);
    options.tau_reject = rng.range(1, 4) as u32;
    options.ramp_ms = 500;
    let triggers = [D2pTrigger::Off, D2pTrigger::Commit, D2pTrigger::Evict, D2pTrigger::Both];
    if prefills > 0 {
        options.d2p_trigger = *rng.pick(&triggers);
    }
    options.d2p_staleness_budget_tokens = *rng.pick(&[Some(0), Some(96), Some(4096), None]);
    options.d2p_sync_target_policy =
        *rng.pick(&[D2pTarget::LastP, D2pTarget::RoundRobin, D2pTarget::Broadcast]);
    options
}

fn rates(rng: &mut Rng, calm: bool) -> [u64; 7] {
    if calm || rng.chance(25) {
        return [0; 7];
    }
    let level = *rng.pick(&[4, 15, 60]);
    std::array::from_fn(|_| if rng.chance(40) { level } else { 0 })
}

fn api(rng: &mut Rng) -> Api {
    *rng.pick(&[Api::Chat, Api::Chat, Api::Chat, Api::Completions, Api::Responses, Api::Messages])
}

fn session(rng: &mut Rng, schedule: &Schedule, api: Api) -> Vec<TurnPlan> {
    let turns = if schedule.crowded { rng.range(1, 4) } else { rng.range(1, 6) };
    (0..turns).map(|turn| turn_plan(rng, schedule, (turn == 0, api))).collect()
}

fn turn_plan(rng: &mut Rng, schedule: &Schedule, (first, api): (bool, Api)) -> TurnPlan {
    let sort = match rng.range(0, 20) {
        _ if first => Sort::Append,
        0..=1 => Sort::Compact,
        2..=3 => Sort::Sub,
        4 => Sort::Side,
        _ => Sort::Append,
    };
    let pool = schedule.k_d / 24;
    let blocks = match first {
        true if schedule.crowded => rng.range(pool / 4, pool * 3 / 4),
        true => rng.range(2, 24),
        false => rng.range(1, 12),
    };
    let leave = match rng.range(0, 100) {
        0..=7 => Leave::Before(rng.ms(0, 1500)),
        8..=13 => Leave::Within(rng.range(1, 4) as usize),
        _ => Leave::Never,
    };
    TurnPlan {
        rest: if schedule.crowded || rng.chance(30) { Duration::ZERO } else { rng.ms(0, 900) },
        sort,
        bytes: (blocks * 96 + rng.range(0, 96)) as usize,
        max_tokens: rng.range(1, 14),
        stream: rng.chance(80),
        leave,
        parallel: rng.chance(15),
        gateway: rng.range(0, schedule.gateways as u64) as usize,
        api: if matches!(sort, Sort::Sub | Sort::Side) { self::api(rng) } else { api },
    }
}

/// What some seeds lean towards: faults that seldom meet by chance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lean {
    None,
    /// The only D dies for long while it computes a session's first prompt.
    Orphans,
    /// Many wait for room, and the router actor dies.
    Waiters,
    /// A worker starts anew, and its events are lost or come late.
    Events,
    /// KV frames are garbled, legs come late, and clocks run ahead of leases.
    Frames,
}

impl Lean {
    fn of(seed: u64) -> Self {
        match seed % 10 {
            6 => Self::Orphans,
            7 => Self::Waiters,
            8 => Self::Events,
            9 => Self::Frames,
            _ => Self::None,
        }
    }

    /// The fleet and its rules.
    fn before(self, rng: &mut Rng, schedule: &mut Schedule) {
        if self == Self::None {
            return;
        }
        let (d2p, reserve) = (Options { d2p_trigger: D2pTrigger::Off, ..Options::production() }, [0.95, 1.0]);
        schedule.options = Options {
            rho: *rng.pick(&reserve),
            tau_append: schedule.options.tau_append,
            ramp_ms: 500,
            ..d2p
        };
        (schedule.gateways, schedule.rates, schedule.max_inflight) = (1, [0; 7], 64);
        schedule.ready = true;
        match self {
            Self::None => {}
            Self::Orphans => {
                (schedule.prefills, schedule.decodes, schedule.crowded) = (0, 1, true);
                (schedule.time_scale, schedule.options.queue_deadline_ms) = (0.05, 500);
            }
            Self::Waiters => {
                (schedule.prefills, schedule.decodes, schedule.crowded) = (0, rng.range(1, 3) as usize, true);
                (schedule.time_scale, schedule.options.queue_deadline_ms) = (0.1, 6000);
                schedule.k_d = schedule.k_d.min(40 * 24);
            }
            Self::Events => {
                (schedule.decodes, schedule.crowded) = (rng.range(2, 4) as usize, false);
                schedule.time_scale = 0.3;
                schedule.rates[Msg::Event as usize] = 15;
            }
            Self::Frames => {
                (schedule.prefills, schedule.decodes) = (rng.range(1, 3) as usize, rng.range(1, 3) as usize);
                if rng.chance(50) {
                    // Its first turns always go through a P.
                    schedule.options =
                        Options { tau_append: schedule.options.tau_append, ..Options::paper() };
                }
                schedule.options.lease_ms = 1500;
                schedule.rates[Msg::Ask as usize] = *rng.pick(&[60, 300]);
                schedule.rates[Msg::Transfer as usize] = *rng.pick(&[0, 120, 250]);
            }
        }
    }

    /// What goes wrong.
    fn after(self, rng: &mut Rng, schedule: &mut Schedule) {
        let nodes = (schedule.prefills + schedule.decodes) as u64;
        match self {
            Self::None => {}
            Self::Orphans => {
                let action = Action::Kill { node: 0, back: rng.ms(6000, 12_000) };
                schedule.at_times.push((rng.ms(50, 900), action));
            }
            Self::Waiters => {
                for _ in 0..4 {
                    let action = Action::Actor { kind: Kind::Router, act: Act::Panic };
                    schedule.at_times.push((rng.ms(100, 2500), action));
                }
            }
            Self::Events => {
                for _ in 0..3 {
                    let node = rng.range(0, schedule.decodes as u64) as usize;
                    let action = Action::Kill { node, back: rng.ms(20, 300) };
                    schedule.at_times.push((rng.ms(200, 1200), action));
                }
            }
            Self::Frames => {
                for _ in 0..4 {
                    let node = rng.range(0, nodes) as usize;
                    let action = Action::Skew { node, ms: rng.range(1000, 3000) };
                    schedule.at_messages.push((rng.range(10, 150), action));
                }
            }
        }
    }
}

fn action(rng: &mut Rng, schedule: &Schedule) -> Action {
    let nodes = schedule.prefills + schedule.decodes;
    let node = rng.range(0, nodes as u64) as usize;
    let gateway = rng.range(0, schedule.gateways as u64) as usize;
    let span = *rng.pick(&[rng.clone().ms(5, 200), rng.clone().ms(200, 3000), rng.clone().ms(3000, 12_000)]);
    match rng.range(0, 20) {
        0..=4 => Action::Kill { node, back: span },
        5..=6 => Action::Freeze { node, span },
        7 => Action::Slow { node, span },
        8..=9 => Action::Partition { a: Host::gateway(gateway), b: Host(node as u8), span },
        10 => {
            let other = rng.range(0, nodes as u64) as usize;
            Action::Partition { a: Host(other as u8), b: Host(node as u8), span }
        }
        11 => Action::Reset { node },
        12..=15 => {
            let kind = *rng.pick(&[Kind::Session, Kind::Worker, Kind::Router, Kind::Router, Kind::Done]);
            let act = if rng.chance(70) { Act::Panic } else { Act::Pause(span) };
            Action::Actor { kind, act }
        }
        16 => Action::Skew { node, ms: span.as_millis() as u64 },
        17 => Action::Jump { span },
        18 if rng.chance(50) => Action::DropBackups { node },
        18 => Action::Drain { node, span },
        _ => Action::Gateway { n: gateway },
    }
}
