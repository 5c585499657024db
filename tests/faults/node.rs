//! A worker: the real engine and its real handlers, without sockets. It can be killed, started anew and frozen.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvc_router::net::Network;
use kvc_router::node::NodeConfig;
use kvc_router::node::builtin::engine::Engine;
use kvc_router::node::d2p::receive::PrefillKvReceiver;
use kvc_router::node::http::App;
use kvc_router::node::transfer::receive::Receiver;
use kvc_router::wire::PROTOCOL;
use kvc_router::wire::info::{KvRole, NodeInfo};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// One start of a node.
#[derive(Debug)]
pub struct Life {
    pub app: Arc<App>,
    pub kv: Arc<Receiver>,
    pub pushes: Arc<PrefillKvReceiver>,
    pub dead: CancellationToken,
    tasks: Mutex<JoinSet<()>>,
}

#[derive(Debug, Default)]
pub struct Gate {
    shut: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

/// One node of the fleet.
#[derive(Debug)]
pub struct SimNode {
    pub name: Arc<str>,
    pub config: NodeConfig,
    pub life: Mutex<Option<Arc<Life>>>,
    epoch: AtomicU64,
    pub gate: Arc<Gate>,
    /// How far its clock is ahead, in ms.
    pub skew: AtomicU64,
}

impl SimNode {
    pub fn new(config: NodeConfig) -> Self {
        Self {
            name: config.name.as_str().into(),
            config,
            life: Mutex::default(),
            epoch: AtomicU64::new(0),
            gate: Arc::default(),
            skew: AtomicU64::new(0),
        }
    }

    pub fn decodes(&self) -> bool {
        self.config.roles.contains(&KvRole::Decode)
    }

    pub fn life(&self) -> Option<Arc<Life>> {
        self.life.lock().unwrap().clone()
    }

    /// A new incarnation: the next epoch, empty.
    pub fn start(&self, network: Arc<dyn Network>) {
        let epoch = self.epoch.fetch_add(1, Relaxed) + 1;
        let engine = Engine::new(self.config.clone(), epoch, network);
        let takes = |role: KvRole, port: u16| {
            self.config.roles.contains(&role).then(|| format!("{}:{port}", self.name))
        };
        let info = NodeInfo {
            protocol: PROTOCOL,
            name: self.config.name.clone(),
            epoch,
            roles: self.config.roles.iter().copied().collect(),
            model: self.config.model.clone(),
            k_d: self.config.k_d,
            block_tokens: self.config.options.block_tokens,
            kv_bytes_per_token: self.config.kv.kv_bytes_per_token,
            kv_addr: takes(KvRole::Decode, 9000),
            d2p_addr: takes(KvRole::PrefillBackupReceiver, 22000),
        };
        let life = Arc::new(Life {
            app: App::new(engine.clone(), info),
            kv: Arc::new(Receiver::of(&engine)),
            pushes: PrefillKvReceiver::new(engine.clone()),
            dead: CancellationToken::new(),
            tasks: Mutex::default(),
        });
        *self.life.lock().unwrap() = Some(life.clone());
        let ticking = engine.clone();
        self.spawn(&life, async move {
            loop {
                tokio::time::sleep(Engine::TICK).await;
                ticking.tick();
            }
        });
        if engine.sync.rule.is_some() {
            self.spawn(&life, async move { engine.push_backups().await });
        }
    }

    /// Ends everything that runs there. The caller breaks its connections.
    pub fn kill(&self) {
        if let Some(life) = self.life.lock().unwrap().take() {
            life.dead.cancel();
            life.tasks.lock().unwrap().abort_all();
        }
    }

    /// Runs something on the node: it dies with it and stands still with it.
    pub fn spawn(&self, life: &Arc<Life>, work: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = life.tasks.lock().unwrap();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(Gated { work: Box::pin(work), gate: self.gate.clone() });
    }

    pub fn skew(&self) -> Duration {
        Duration::from_millis(self.skew.load(Relaxed))
    }
}

impl Gate {
    pub fn shut(&self) {
        self.shut.store(true, Relaxed);
    }

    pub fn open(&self) {
        self.shut.store(false, Relaxed);
        self.waiting.lock().unwrap().drain(..).for_each(Waker::wake);
    }

    /// Pending while the node is frozen.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.shut.load(Relaxed) {
            self.waiting.lock().unwrap().push(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(())
    }
}

/// A task of a node that may be frozen.
struct Gated<F> {
    work: Pin<Box<F>>,
    gate: Arc<Gate>,
}

impl<F: Future<Output = ()>> Future for Gated<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        std::task::ready!(self.gate.poll(cx));
        self.work.as_mut().poll(cx)
    }
}
