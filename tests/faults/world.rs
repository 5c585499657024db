//! Plays a schedule and looks at what is left.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix_web::App;
use actix_web::dev::Service as _;
use kvc_router::Settings;
use kvc_router::actors::handle::{TurnRouter, WorkerSpec};
use kvc_router::actors::shared::Config;
use kvc_router::actors::slot::Role;
use kvc_router::core::cost::CostModel;
use kvc_router::core::options::D2pTrigger;
use kvc_router::engines::client::Connector;
use kvc_router::fault_lab::{self, Act, Bug, Site};
use kvc_router::http::Gateway;
use kvc_router::http::live::Live;
use kvc_router::node::{Clock, NodeConfig};
use kvc_router::settings::Layers;
use kvc_router::watch::Watch;
use kvc_router::wire::info::KvRole;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::LocalSet;
use tokio::time::sleep;

use super::client::{Client, Door, Ends, KV, MODEL, Service, World};
use super::counters::Counters;
use super::dice::Dice;
use super::net::{Action, Endpoint, Host, Net};
use super::node::SimNode;
use super::schedule::Schedule;
use super::trace::Event;

/// How a schedule went.
#[derive(Debug, Clone)]
pub struct Report {
    pub seed: u64,
    pub violations: Vec<String>,
    pub tail: String,
    pub events: Vec<Event>,
    pub messages: u64,
    pub ends: Ends,
    pub faults: BTreeMap<(&'static str, &'static str), u64>,
    pub longest: Duration,
}

/// Plays a seed's schedule.
pub fn play(seed: u64, bug: Option<Bug>) -> Report {
    let schedule = Schedule::draw(seed);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let counters = Counters::install();
    let local = LocalSet::new();
    let report = local.block_on(&runtime, run(schedule, bug, &counters));
    drop(local);
    drop(runtime);
    fault_lab::install(None, None);
    report
}

struct Hooks(Arc<Net>);

impl fault_lab::Lab for Hooks {
    fn at(&self, site: Site<'_>) -> Act {
        self.0.at(site)
    }

    fn skew(&self, node: &str) -> Duration {
        self.0.host(node).map_or(Duration::ZERO, |place| self.0.nodes[place].skew())
    }
}

/// A gateway that can be started anew.
struct Machine {
    number: usize,
    turns: RefCell<TurnRouter>,
    instance: Cell<u64>,
}

fn settings(resume: bool) -> &'static Settings {
    static SETTINGS: [OnceLock<Settings>; 2] = [const { OnceLock::new() }; 2];
    SETTINGS[usize::from(resume)].get_or_init(|| {
        let flags = [
            ("http.resume_streams", if resume { "true" } else { "false" }),
            ("http.first_byte_timeout_s", "40"),
            ("http.idle_timeout_s", "15"),
            ("http.max_inflight", "64"),
            ("fleet.connect_timeout_ms", "1000"),
        ];
        let flags = flags.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings
    })
}

fn nodes(schedule: &Schedule) -> Vec<Arc<SimNode>> {
    let node = |name: String, role: KvRole, sync: KvRole| {
        let mut roles = vec![role];
        if schedule.options.d2p_trigger != D2pTrigger::Off {
            roles.push(sync);
        }
        let mut config = NodeConfig::new(name, roles);
        config.model = MODEL.into();
        config.k_d = schedule.k_d;
        config.kv = KV;
        config.options = schedule.options.clone();
        config.d2p_host_tokens = Some(schedule.host_tokens);
        config.cost = Clock { model: CostModel::reference(), time_scale: schedule.time_scale };
        config.limits.queue_deadline = schedule.node_queue.0;
        config.limits.queue_turns = schedule.node_queue.1;
        config.limits.grow_deadline = Duration::from_secs(3);
        config.limits.transfer_wait = Duration::from_secs(20);
        config.limits.transfer_patience = Duration::from_secs(8);
        config.limits.transfer_idle = Duration::from_secs(3);
        Arc::new(SimNode::new(config))
    };
    let d = (0..schedule.decodes).map(|i| node(format!("d{i}"), KvRole::Decode, KvRole::DecodeBackupSender));
    let p =
        (0..schedule.prefills).map(|i| node(format!("p{i}"), KvRole::Prefill, KvRole::PrefillBackupReceiver));
    d.chain(p).collect()
}

impl Machine {
    async fn start(
        net: &Arc<Net>,
        schedule: &Schedule,
        number: usize,
        life: u64,
    ) -> (TurnRouter, u64, Service) {
        let instance = (number as u64 + 1) << 8 | life;
        let config = Config {
            options: Arc::new(schedule.options.clone()),
            max_inflight: schedule.max_inflight,
            passivate: Duration::from_secs(2),
            instance,
            ..Config::default()
        };
        let specs = net.nodes.iter().map(|node| WorkerSpec {
            name: node.name.to_string(),
            url: format!("http://{}:80", node.name),
            role: if node.decodes() { Role::Decode } else { Role::Prefill },
        });
        let endpoint = Endpoint { net: net.clone(), host: Host::gateway(number) };
        let turns = TurnRouter::start(config, specs.collect(), Arc::new(endpoint.clone())).await.unwrap();
        let settings = settings(schedule.resume);
        let live = Live::new(turns.clone(), settings.sessions.clone().into(), None, None);
        let connector = Connector::new(&settings.fleet).unwrap();
        let gateway = Gateway::new(settings, live, connector).through(Arc::new(endpoint));
        let app = App::new().configure(|app| gateway.configure(app));
        let app = Rc::new(actix_web::test::init_service(app).await);
        let service: Service = Rc::new(move |request| {
            let app = app.clone();
            Box::pin(async move { app.call(request.to_request()).await.unwrap().map_into_boxed_body() })
        });
        (turns, instance, service)
    }
}

async fn run(schedule: Schedule, bug: Option<Bug>, counters: &Counters) -> Report {
    let (driver, mut wishes) = unbounded_channel();
    let dice = Dice::new(schedule.seed ^ 0xd1ce, schedule.rates);
    let net = Net::new(nodes(&schedule), dice, schedule.latency, schedule.at_messages.clone(), driver);
    fault_lab::install(Some(Rc::new(Hooks(net.clone()))), bug);
    for (place, node) in net.nodes.iter().enumerate() {
        node.start(Arc::new(Endpoint { net: net.clone(), host: Host(place as u8) }));
    }
    let mut machines = Vec::new();
    let mut doors = Vec::new();
    for number in 0..schedule.gateways {
        let (turns, instance, service) = Machine::start(&net, &schedule, number, 1).await;
        let turns_here = RefCell::new(Some((turns.clone(), instance)));
        doors.push(Door { service: RefCell::new(Some(service)), turns: turns_here, life: Watch::new(1) });
        machines.push(Machine { number, turns: RefCell::new(turns), instance: Cell::new(instance) });
    }
    let watched = net.clone();
    let watcher = tokio::spawn(async move {
        loop {
            sleep(Duration::from_millis(200)).await;
            watched.rules.instant(&watched.nodes, 1);
        }
    });
    let world = Rc::new(World {
        net: net.clone(),
        gateways: doors,
        ends: RefCell::default(),
        answered: RefCell::default(),
        calm: schedule.is_calm(),
        longest: Cell::default(),
        options: schedule.options.clone(),
    });
    if schedule.ready {
        let turns = machines[0].turns.borrow().clone();
        turns.all_up(Duration::from_secs(5)).await;
    }
    for (at, action) in schedule.at_times.clone() {
        let net = net.clone();
        tokio::spawn(async move {
            sleep(at).await;
            net.act(action);
        });
    }
    let clients: Vec<Rc<Client>> = (0..schedule.sessions.len())
        .map(|n| Client::new(&world, n, schedule.apis[n], schedule.seed, schedule.shared))
        .collect();
    let lives: Vec<_> = clients
        .iter()
        .zip(&schedule.sessions)
        .map(|(client, turns)| tokio::task::spawn_local(client.clone().live(turns.clone())))
        .collect();
    let all = async {
        for life in lives {
            if life.await.is_err() {
                net.rules.violated("a client's task panicked");
            }
        }
    };
    let mut all = std::pin::pin!(all);
    loop {
        tokio::select! {
            biased;
            () = &mut all => break,
            wish = wishes.recv() => match wish {
                Some(Action::Jump { span }) => {
                    // What has begun by now did not begin behind the jump.
                    net.rules.instant(&net.nodes, 1);
                    tokio::time::advance(span).await;
                }
                Some(Action::Gateway { n }) => restart(&net, &world, &schedule, &machines[n]).await,
                _ => {}
            },
        }
    }
    net.heal();
    super::after::settles(
        &net,
        &world,
        &schedule,
        &machines.iter().map(|m| (m.turns.borrow().clone(), m.instance.get())).collect::<Vec<_>>(),
    )
    .await;
    for (n, client) in clients.iter().enumerate() {
        client.proves(n % schedule.gateways).await;
    }
    let routers: Vec<_> = machines.iter().map(|m| (m.turns.borrow().clone(), m.instance.get())).collect();
    super::after::nothing_is_left(&net, &world, &schedule, &routers, counters).await;
    watcher.abort();
    for (turns, _) in &routers {
        turns.stop().await;
    }
    let ends = *world.ends.borrow();
    Report {
        seed: schedule.seed,
        violations: net.rules.violations(),
        tail: net.rules.tail(),
        events: net.trace.events(),
        messages: net.messages(),
        ends,
        faults: net.dice.tally(),
        longest: world.longest.get(),
    }
}

/// A gateway dies: its clients and workers see their connections close; it comes back without its memory.
async fn restart(net: &Arc<Net>, world: &Rc<World>, schedule: &Schedule, machine: &Machine) {
    let door = &world.gateways[machine.number];
    let life = door.life.get() + 1;
    *door.service.borrow_mut() = None;
    *door.turns.borrow_mut() = None;
    door.life.modify(|value| *value = life);
    let old = machine.turns.borrow().clone();
    old.stop().await;
    net.rules.loses_releases();
    net.rules.silenced();
    sleep(Duration::from_millis(200)).await;
    let (turns, instance, service) = Machine::start(net, schedule, machine.number, life).await;
    *door.turns.borrow_mut() = Some((turns.clone(), instance));
    *machine.turns.borrow_mut() = turns;
    machine.instance.set(instance);
    *door.service.borrow_mut() = Some(service);
    door.life.modify(|value| *value += 1);
}
