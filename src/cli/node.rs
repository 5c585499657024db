//! `kvc-router node`.

use std::io::Write as _;
use std::net::ToSocketAddrs as _;
use std::time::Duration;

use clap::Args;

use super::{Exit, SettingsArgs, bad_input, failure};
use crate::core::cost::CostModel;
use crate::core::sync::SyncRule;
use crate::node::beside::Beside;
use crate::node::{Clock, Model, Node, NodeConfig};
use crate::settings::{NodeRole, Settings};
use crate::wire::info::KvRole;

/// One worker: builtin, or beside an engine (`--engine KIND --engine-url URL`).
#[derive(Debug, Args)]
pub struct NodeCommand {
    /// `prefill`, `decode`, or several roles separated by commas.
    #[arg(long, value_name = "ROLES")]
    role: Option<String>,
    /// How much faster than the cost model time passes.
    #[arg(long, value_name = "X")]
    time_scale: Option<String>,
    /// Base URL of the engine to stand beside, of the kind that `--engine` names.
    #[arg(long, value_name = "URL")]
    engine_url: Option<String>,
    /// Stop when standard input ends: a parent that is killed takes its workers along.
    #[arg(long, hide = true)]
    until_eof: bool,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl NodeCommand {
    pub(super) fn run(mut self) -> Exit {
        let own = [
            ("node.roles", self.role.take()),
            ("node.time_scale", self.time_scale.take()),
            ("node.engine_url", self.engine_url.take()),
        ];
        for (key, value) in own {
            self.settings.set.extend(value.map(|value| format!("{key}={value}")));
        }
        if let Some(listen) = self.settings.listen.take() {
            self.settings.set.push(format!("node.listen={listen}"));
        }
        let settings = match self.settings.load() {
            Ok(loaded) => loaded.settings,
            Err(problem) => return bad_input(problem),
        };
        if !settings.fleet.engine.capabilities().admits {
            return beside(&settings, self.until_eof);
        }
        let config = match node_config(&settings) {
            Ok(config) => config,
            Err(problem) => return bad_input(problem),
        };
        crate::telemetry::install_logs(crate::telemetry::SERVICE_LOGS);
        let runtime = match tokio::runtime::Runtime::new() {
            Ok(runtime) => runtime,
            Err(problem) => return failure(problem),
        };
        let grace = Duration::from_secs(settings.http.drain_s);
        let exit = runtime.block_on(async move {
            let node = match Node::start(config).await {
                Ok(node) => node,
                Err(problem) => return failure(problem),
            };
            // Whoever started it reads this line; nobody does when it runs by itself.
            let _ = writeln!(std::io::stdout(), "kvc-router node {}{}", crate::demo::SERVES, node.url());
            tokio::select! {
                () = crate::node::until_told_to_stop() => {}
                () = stdin_ends(), if self.until_eof => {}
            }
            let (running, cut) = node.drain(grace).await;
            eprintln!("stopped: {running} turns were running or promised, {cut} cut");
            Exit::Ok
        });
        // A read of standard input may still be under way; nobody waits for it.
        runtime.shutdown_background();
        exit
    }
}

/// A node beside an engine.
fn beside(settings: &Settings, until_eof: bool) -> Exit {
    if settings.node.engine_url.is_empty() {
        let kind = settings.fleet.engine.as_str();
        return bad_input(format!("`node.engine_url` is empty: --engine {kind} needs --engine-url URL"));
    }
    crate::telemetry::install_logs(crate::telemetry::SERVICE_LOGS);
    actix_web::rt::System::new().block_on(async move {
        let (node, serving) = match Beside::start(settings) {
            Ok(started) => started,
            Err(problem) => return failure(problem),
        };
        let stop = serving.server.handle();
        for addr in &serving.addrs {
            let _ = writeln!(std::io::stdout(), "kvc-router node {}http://{addr}", crate::demo::SERVES);
        }
        tokio::select! {
            ended = serving.server => return ended.map_or_else(failure, |()| Exit::Ok),
            () = crate::node::until_told_to_stop() => {}
            () = stdin_ends(), if until_eof => {}
        }
        node.drain();
        let grace = Duration::from_secs(settings.http.drain_s);
        if tokio::time::timeout(grace, stop.stop(true)).await.is_err() {
            stop.stop(false).await;
        }
        Exit::Ok
    })
}

async fn stdin_ends() {
    // An unreadable standard input has ended, too.
    let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
}

/// The builtin worker that `[node]` describes.
///
/// # Errors
/// Names the key, its value and what is allowed.
pub fn node_config(settings: &Settings) -> Result<NodeConfig, String> {
    let node = &settings.node;
    let resolve = |key: &str, addr: &str| {
        let found = addr.to_socket_addrs().ok().and_then(|mut all| all.next());
        found.ok_or(format!("`node.{key} = {addr:?}` is not allowed: host:port of this machine"))
    };
    let (http, kv) = (resolve("listen", &node.listen)?, resolve("kv_listen", &node.kv_listen)?);
    let syncs = SyncRule::of(&settings.options).is_some();
    let roles = node.roles.iter().flat_map(|role| {
        let (role, backup) = match role {
            NodeRole::Prefill => (KvRole::Prefill, syncs.then_some(KvRole::PrefillBackupReceiver)),
            NodeRole::Decode => (KvRole::Decode, syncs.then_some(KvRole::DecodeBackupSender)),
            NodeRole::PrefillBackupReceiver => (KvRole::PrefillBackupReceiver, None),
            NodeRole::DecodeBackupSender => (KvRole::DecodeBackupSender, None),
        };
        [Some(role), backup].into_iter().flatten()
    });
    let reference = CostModel::reference();
    let model = CostModel {
        prefill_linear: 1000.0 / node.prefill_tokens_per_s,
        decode_base: 1000.0 / node.decode_tokens_per_s,
        ..reference
    };
    Ok(NodeConfig {
        model: node.model.clone(),
        host: http.ip(),
        http_port: http.port(),
        kv_port: kv.port(),
        d2p_port: if node.d2p_port_base == 0 { 0 } else { node.d2p_port_base + node.rank },
        d2p_host_tokens: node.d2p_host_tokens,
        k_d: node.k_d,
        options: settings.options.clone(),
        kv: Model { kv_bytes_per_token: node.kv_bytes_per_token },
        key: settings.fleet.worker_key.get().map(str::to_owned),
        cost: Clock { model, time_scale: node.time_scale },
        ..NodeConfig::new(http.to_string(), roles)
    })
}
