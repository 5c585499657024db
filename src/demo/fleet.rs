//! The demo's workers: in this process, or one child process each (started again when it dies).

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Runtime;

use crate::cli::node_config;
use crate::node::Node;
use crate::settings::{NodeRole, Settings};

/// Between a child's death and its restart.
const RESTART: Duration = Duration::from_secs(1);
/// What `kvc-router node` prints before its URL.
pub const SERVES: &str = "serves ";

/// Running workers.
pub struct Fleet {
    decode: Vec<String>,
    prefill: Vec<String>,
    nodes: Vec<Node>,
    /// Nodes in this process have threads of their own, as they would elsewhere.
    threads: Option<Runtime>,
    keepers: Vec<tokio::task::JoinHandle<()>>,
}

impl Fleet {
    /// Starts `demo.decode` D and `demo.prefill` P workers on ports the system chooses.
    ///
    /// # Errors
    /// One line: which worker does not start, and why.
    pub async fn start(settings: &Settings, processes: bool) -> Result<Self, String> {
        let mut fleet = Self {
            decode: Vec::new(),
            prefill: Vec::new(),
            nodes: Vec::new(),
            threads: if processes { None } else { Some(threads()?) },
            keepers: Vec::new(),
        };
        for (role, count) in
            [(NodeRole::Decode, settings.demo.decode), (NodeRole::Prefill, settings.demo.prefill)]
        {
            for _ in 0..count {
                let url = fleet.worker(settings, role).await?;
                match role {
                    NodeRole::Decode => fleet.decode.push(url),
                    _ => fleet.prefill.push(url),
                }
            }
        }
        Ok(fleet)
    }

    /// Base URLs of the D workers.
    pub fn decode(&self) -> &[String] {
        &self.decode
    }

    /// Base URLs of the P workers.
    pub fn prefill(&self) -> &[String] {
        &self.prefill
    }

    async fn worker(&mut self, settings: &Settings, role: NodeRole) -> Result<String, String> {
        let mut worker = settings.clone();
        worker.node.roles = vec![role];
        worker.node.listen = "127.0.0.1:0".into();
        worker.node.kv_listen = "127.0.0.1:0".into();
        worker.node.d2p_port_base = 0;
        worker.node.k_d = settings.demo.k_d;
        worker.node.time_scale = settings.demo.time_scale;
        if let Some(threads) = &self.threads {
            let started = threads.spawn(Node::start(node_config(&worker)?)).await;
            let node = started.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
            let url = node.url();
            self.nodes.push(node);
            return Ok(url);
        }
        let (child, url) = serving(node_command(&worker)?).await?;
        worker.node.listen = url.trim_start_matches("http://").to_owned();
        self.keepers.push(tokio::spawn(keep(child, url.clone(), move || node_command(&worker))));
        Ok(url)
    }

    /// Stops all workers.
    pub async fn stop(mut self) {
        for node in std::mem::take(&mut self.nodes) {
            node.stop().await;
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for keeper in &self.keepers {
            // Dropping the keeper drops its child, which kills it.
            keeper.abort();
        }
        if let Some(threads) = self.threads.take() {
            // An async context may not wait for them.
            threads.shutdown_background();
        }
    }
}

/// Starts a child again whenever it dies, at the address its gateway knows.
pub(super) async fn keep(mut child: Child, url: String, command: impl Fn() -> Result<Command, String>) {
    loop {
        // Waiting would close it, and the worker takes that for the end of this process.
        let stdin = child.stdin.take();
        let _ = child.wait().await;
        drop(stdin);
        eprintln!("a worker at {url} died; starting it again");
        child = loop {
            tokio::time::sleep(RESTART).await;
            let started = match command() {
                Ok(command) => serving(command).await,
                Err(error) => Err(error),
            };
            match started {
                Ok((child, _)) => break child,
                Err(error) => eprintln!("{error}"),
            }
        };
    }
}

/// Starts a worker that ends with its standard input; it and the URL it says that it serves on.
pub(super) async fn serving(mut command: Command) -> Result<(Child, String), String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(|e| format!("cannot start a worker: {e}"))?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        let _ = BufReader::new(stdout).read_line(&mut line).await;
    }
    let url = line.split_once(SERVES).map(|(_, url)| url.trim().to_owned());
    url.map(|url| (child, url)).ok_or("a worker ended before it served".into())
}

/// What a child must know of the algorithm: when it pushes, and how much it may be behind.
fn sync_options(settings: &Settings) -> Vec<String> {
    let Ok(serde_json::Value::Object(options)) = serde_json::to_value(&settings.options) else {
        return Vec::new();
    };
    let mine = options.into_iter().filter(|(key, _)| key.starts_with("d2p_"));
    mine.map(|(key, value)| {
        let value = match value {
            serde_json::Value::Null => "inf".to_owned(),
            serde_json::Value::String(word) => word,
            other => other.to_string(),
        };
        format!("--set=algorithm.{key}={value}")
    })
    .collect()
}

fn node_command(settings: &Settings) -> Result<Command, String> {
    let node = &settings.node;
    let exe = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
    let role = match node.roles.as_slice() {
        [NodeRole::Prefill] => "prefill",
        _ => "decode",
    };
    let set = |key: &str, value: &dyn std::fmt::Display| format!("--set=node.{key}={value}");
    let algorithm = sync_options(settings);
    let mut command = Command::new(exe);
    command
        .arg("node")
        .arg("--until-eof")
        .arg(format!("--role={role}"))
        .arg(set("listen", &node.listen))
        .arg(set("kv_listen", &node.kv_listen))
        .arg(set("d2p_port_base", &node.d2p_port_base))
        .args(node.d2p_host_tokens.map(|tokens| set("d2p_host_tokens", &tokens)))
        .args(algorithm)
        .arg(set("model", &node.model))
        .arg(set("k_d", &node.k_d))
        .arg(set("kv_bytes_per_token", &node.kv_bytes_per_token))
        .arg(set("prefill_tokens_per_s", &node.prefill_tokens_per_s))
        .arg(set("decode_tokens_per_s", &node.decode_tokens_per_s))
        .arg(set("time_scale", &node.time_scale))
        // Not as an argument: those can be seen by everybody.
        .env("KVC__FLEET__WORKER_KEY", settings.fleet.worker_key.get().unwrap_or_default());
    Ok(command)
}

fn threads() -> Result<Runtime, String> {
    Runtime::new().map_err(|e| format!("cannot start threads: {e}"))
}
