//! The network between gateways and workers, and what may happen to it and to the machines on it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_core::future::BoxFuture;
use kvc_router::fault_lab::{Act, Site};
use kvc_router::net::{Network, Stream};
use kvc_router::node::{d2p, http, transfer};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep, sleep_until};

use super::dice::{Dice, Msg};
use super::legs::Legs;
use super::node::SimNode;
use super::pipe::Line;
use super::rules::Rules;
use super::trace::Trace;

/// A machine: a node by its place, or a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host(pub u8);

const GATEWAYS: u8 = 100;

impl Host {
    pub fn gateway(n: usize) -> Self {
        Self(GATEWAYS + n as u8)
    }

    pub fn is_gateway(self) -> bool {
        self.0 >= GATEWAYS
    }
}

/// Which actor a fault is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Session,
    Worker,
    Router,
    /// Any of them, after it has handled its message.
    Done,
}

/// A fault that is not one message's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Kill {
        node: usize,
        back: Duration,
    },
    Freeze {
        node: usize,
        span: Duration,
    },
    Slow {
        node: usize,
        span: Duration,
    },
    Partition {
        a: Host,
        b: Host,
        span: Duration,
    },
    /// All connections of a node are reset; it goes on.
    Reset {
        node: usize,
    },
    Actor {
        kind: Kind,
        act: Act,
    },
    /// The clock of one node jumps ahead.
    Skew {
        node: usize,
        ms: u64,
    },
    /// Everybody's clock jumps ahead.
    Jump {
        span: Duration,
    },
    DropBackups {
        node: usize,
    },
    /// A node takes no new turns for a while.
    Drain {
        node: usize,
        span: Duration,
    },
    /// A gateway dies and comes back without its memory.
    Gateway {
        n: usize,
    },
}

impl Action {
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill { .. } => "kill and restart",
            Self::Freeze { .. } => "freeze",
            Self::Slow { .. } => "slow",
            Self::Partition { .. } => "partition",
            Self::Reset { .. } => "reset",
            Self::Actor { act: Act::Panic, .. } => "panic",
            Self::Actor { .. } => "pause",
            Self::Skew { .. } => "clock of one",
            Self::Jump { .. } => "clock of all",
            Self::DropBackups { .. } => "backups dropped",
            Self::Drain { .. } => "drain",
            Self::Gateway { .. } => "gateway restart",
        }
    }

    fn on(self) -> &'static str {
        match self {
            Self::Actor { kind: Kind::Session, .. } => "session actor",
            Self::Actor { kind: Kind::Worker, .. } => "worker actor",
            Self::Actor { kind: Kind::Router, .. } => "router actor",
            Self::Actor { kind: Kind::Done, .. } => "an actor, after its message",
            Self::Gateway { .. } | Self::Jump { .. } => "gateways",
            Self::Partition { .. } => "links",
            _ => "worker",
        }
    }
}

#[derive(Debug, Default)]
struct Inner {
    messages: u64,
    number: u64,
    lines: Vec<Weak<Line>>,
    held: BTreeSet<(Host, Host)>,
    slow: BTreeMap<Host, u32>,
    triggers: Vec<(u64, Action)>,
    armed: Vec<(Kind, Act)>,
    healed: bool,
    /// Until when an actor is held up.
    paused_until: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub struct Net {
    pub nodes: Vec<Arc<SimNode>>,
    pub dice: Dice,
    pub trace: Arc<Trace>,
    pub rules: Rules,
    pub legs: Legs,
    latency: Duration,
    inner: Mutex<Inner>,
    /// What only the driver of the schedule can do.
    driver: UnboundedSender<Action>,
}

impl Net {
    pub fn new(
        nodes: Vec<Arc<SimNode>>,
        dice: Dice,
        latency: Duration,
        triggers: Vec<(u64, Action)>,
        driver: UnboundedSender<Action>,
    ) -> Arc<Self> {
        let inner = Mutex::new(Inner { triggers, ..Inner::default() });
        let (trace, legs) = (Arc::new(Trace::new()), Legs::default());
        let rules = Rules::new(nodes.len(), trace.clone());
        Arc::new(Self { nodes, dice, trace, rules, legs, latency, inner, driver })
    }

    pub fn host(&self, name: &str) -> Option<usize> {
        self.nodes.iter().position(|node| *node.name == *name)
    }

    pub fn number(&self) -> u64 {
        let mut inner = self.inner.lock().unwrap();
        inner.number += 1;
        inner.number
    }

    pub fn register(&self, line: &Arc<Line>) {
        let mut inner = self.inner.lock().unwrap();
        inner.lines.retain(|line| line.strong_count() > 0);
        inner.lines.push(Arc::downgrade(line));
    }

    pub fn messages(&self) -> u64 {
        self.inner.lock().unwrap().messages
    }

    /// A message is sent: rules are checked, and its time may have come for something else.
    pub fn message(self: &Arc<Self>, msg: Msg, a: u64, b: u64) {
        self.trace.push(msg.name(), a, b);
        let (count, due) = {
            let mut inner = self.inner.lock().unwrap();
            inner.messages += 1;
            let count = inner.messages;
            let (due, rest) =
                std::mem::take(&mut inner.triggers).into_iter().partition(|(at, _)| *at <= count);
            inner.triggers = rest;
            (count, due)
        };
        self.rules.instant(&self.nodes, count);
        let due: Vec<(u64, Action)> = due;
        due.into_iter().for_each(|(_, action)| self.act(action));
    }

    pub fn latency(&self, a: Host, b: Host) -> Duration {
        let inner = self.inner.lock().unwrap();
        let slow = |host| inner.slow.get(&host).copied().unwrap_or(1);
        self.latency * slow(a).max(slow(b))
    }

    pub fn is_held(&self, a: Host, b: Host) -> bool {
        self.inner.lock().unwrap().held.contains(&(a.min(b), a.max(b)))
    }

    /// Waits while two machines cannot reach each other.
    pub async fn passes(&self, a: Host, b: Host) {
        while self.is_held(a, b) {
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn lines(&self) -> Vec<Arc<Line>> {
        self.inner.lock().unwrap().lines.iter().filter_map(Weak::upgrade).collect()
    }

    fn break_lines(&self, host: Host) {
        self.lines().iter().filter(|line| line.touches(host)).for_each(|line| line.break_off());
    }

    pub fn cut_soon(&self, line: &Arc<Line>, at: Instant) {
        let line = line.clone();
        tokio::spawn(async move {
            // What was delivered right before is read first.
            sleep_until(at + Duration::from_micros(1500)).await;
            line.break_off();
        });
    }

    /// Does something, and undoes it when its time is over.
    pub fn act(self: &Arc<Self>, action: Action) {
        if self.inner.lock().unwrap().healed {
            return;
        }
        self.dice.count(action.on(), action.name());
        self.trace.push(action.name(), action.on().len() as u64, 0);
        let after = |net: &Arc<Self>, span: Duration, then: fn(&Arc<Self>, Action)| {
            let net = net.clone();
            tokio::spawn(async move {
                sleep(span).await;
                then(&net, action);
            });
        };
        match action {
            Action::Kill { node, back } => {
                self.nodes[node].kill();
                self.rules.disturbed(node);
                self.break_lines(Host(node as u8));
                after(self, back, |net, action| {
                    if let Action::Kill { node, .. } = action {
                        net.revive(node);
                    }
                });
            }
            Action::Freeze { node, span } => {
                self.nodes[node].gate.shut();
                self.rules.silenced();
                after(self, span, |net, action| {
                    if let Action::Freeze { node, .. } = action {
                        net.nodes[node].gate.open();
                    }
                });
            }
            Action::Slow { node, span } => {
                self.inner.lock().unwrap().slow.insert(Host(node as u8), 40);
                self.rules.silenced();
                after(self, span, |net, action| {
                    if let Action::Slow { node, .. } = action {
                        net.inner.lock().unwrap().slow.remove(&Host(node as u8));
                    }
                });
            }
            Action::Partition { a, b, span } => {
                self.inner.lock().unwrap().held.insert((a.min(b), a.max(b)));
                self.rules.silenced();
                after(self, span, |net, action| {
                    if let Action::Partition { a, b, .. } = action {
                        net.inner.lock().unwrap().held.remove(&(a.min(b), a.max(b)));
                        net.lines().iter().for_each(|line| line.wake());
                    }
                });
            }
            Action::Reset { node } => self.break_lines(Host(node as u8)),
            Action::Actor { kind, act } => self.inner.lock().unwrap().armed.push((kind, act)),
            Action::Skew { node, ms } => {
                self.rules.instant(&self.nodes, 1);
                self.rules.silenced();
                self.nodes[node].skew.fetch_add(ms, Relaxed);
            }
            Action::DropBackups { node } => {
                if let Some(life) = self.nodes[node].life() {
                    life.app.engine.with(|s, _| s.drop_backups());
                }
            }
            Action::Drain { node, span } => {
                self.drain(node, true);
                after(self, span, |net, action| {
                    if let Action::Drain { node, .. } = action {
                        net.drain(node, false);
                    }
                });
            }
            Action::Jump { .. } | Action::Gateway { .. } => drop(self.driver.send(action)),
        }
    }

    /// Waits until no actor is held up any more.
    pub async fn awake(&self) {
        let until = self.inner.lock().unwrap().paused_until;
        if let Some(until) = until {
            sleep_until(until).await;
        }
    }

    fn drain(&self, node: usize, draining: bool) {
        if let Some(life) = self.nodes[node].life() {
            life.app.draining.store(draining, Relaxed);
        }
    }

    fn revive(self: &Arc<Self>, node: usize) {
        if self.nodes[node].life().is_none() {
            self.trace.push("restart", node as u64, 0);
            self.nodes[node].start(Arc::new(Endpoint { net: self.clone(), host: Host(node as u8) }));
        }
    }

    /// From now on nothing goes wrong any more.
    pub fn heal(self: &Arc<Self>) {
        self.dice.calm();
        {
            let mut inner = self.inner.lock().unwrap();
            inner.healed = true;
            inner.held.clear();
            inner.slow.clear();
            inner.armed.clear();
            inner.triggers.clear();
        }
        for node in 0..self.nodes.len() {
            self.nodes[node].gate.open();
            self.drain(node, false);
            self.revive(node);
        }
        self.lines().iter().for_each(|line| line.wake());
    }

    /// What happens to an actor at this message.
    pub fn at(&self, site: Site<'_>) -> Act {
        let kind = match site {
            Site::Session { .. } => Kind::Session,
            Site::Worker(_) => Kind::Worker,
            Site::Router(_) => Kind::Router,
            Site::Done(_) => Kind::Done,
        };
        self.rules.decides(site);
        let mut inner = self.inner.lock().unwrap();
        let Some(place) = inner.armed.iter().position(|(armed, _)| *armed == kind) else { return Act::Go };
        let (_, act) = inner.armed.remove(place);
        drop(inner);
        self.trace.push("actor", kind as u64, u64::from(act == Act::Panic));
        if act == Act::Panic && kind != Kind::Worker && kind != Kind::Router {
            self.rules.forgetful();
        }
        if let Act::Pause(span) = act {
            self.rules.silenced();
            let mut inner = self.inner.lock().unwrap();
            inner.paused_until = inner.paused_until.max(Some(Instant::now() + span));
        }
        act
    }
}

/// The network as one machine sees it.
#[derive(Debug, Clone)]
pub struct Endpoint {
    pub net: Arc<Net>,
    pub host: Host,
}

impl Network for Endpoint {
    fn connect<'a>(&'a self, authority: &'a str) -> BoxFuture<'a, io::Result<Stream>> {
        Box::pin(async move {
            let (name, port) = authority.split_once(':').ok_or(io::ErrorKind::InvalidInput)?;
            let place = self.net.host(name).ok_or(io::ErrorKind::NotFound)?;
            let to = Host(place as u8);
            sleep(self.net.latency(self.host, to)).await;
            self.net.passes(self.host, to).await;
            let node = &self.net.nodes[place];
            let Some(life) = node.life() else { return Err(io::ErrorKind::ConnectionRefused.into()) };
            let (near, far) = Line::open(&self.net, self.host, to, port != "80");
            self.net.trace.push("connect", u64::from(self.host.0), place as u64);
            match port {
                "80" => node.spawn(&life, http::serve(life.app.clone(), far)),
                "9000" => node.spawn(&life, transfer::receive::serve(life.kv.clone(), far)),
                _ => node.spawn(&life, d2p::receive::serve(life.pushes.clone(), far)),
            }
            Ok(Box::new(near) as Stream)
        })
    }
}
