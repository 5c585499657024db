//! llama.cpp servers as child processes: they end with the demo, however it ends, and start again when they die.

use std::fs::File;
use std::path::PathBuf;
use std::process::Stdio;

use tokio::process::Command;
use tokio::task::JoinHandle;

use super::install::Installed;
use super::{Error, MODEL};
use crate::demo::fleet::{keep, serving};

/// Serves llama.cpp's HTTP API until its standard input ends.
const HOST: &str = include_str!("llama_server.py");
/// Sequences a server works on at once.
const SLOTS: u32 = 4;
/// Tokens of KV of one server: its slots have equal parts.
pub const CONTEXT: u32 = SLOTS * 4096;

/// Running servers.
#[derive(Debug)]
pub struct Servers {
    /// Their base URLs.
    pub urls: Vec<String>,
    keepers: Vec<JoinHandle<()>>,
}

impl Servers {
    /// Starts `count` servers on ports the system chooses. What they log is in `logs`.
    ///
    /// # Errors
    /// One does not start.
    pub async fn start(installed: &Installed, count: u32, logs: PathBuf) -> Result<Self, Error> {
        let mut servers = Self { urls: Vec::new(), keepers: Vec::new() };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / count.max(1) as usize).max(1);
        for i in 0..count {
            let log = logs.join(format!("llama-{i}.log"));
            let (python, model) = (installed.python.clone(), installed.model.clone());
            let failed = format!("a llama.cpp server does not start; it says why in {}", log.display());
            let command = move |port: u16| {
                let asked = serde_json::json!({
                    "model": model, "name": MODEL, "port": port, "slots": SLOTS, "context": CONTEXT, "threads": threads,
                });
                let mut command = Command::new(&python);
                command.args(["-c", HOST]).arg(asked.to_string());
                command.stderr(File::create(&log).map_or_else(|_| Stdio::null(), Stdio::from));
                command
            };
            let (child, url) =
                serving(command(0)).await.map_err(|e| Error::Failed(format!("{failed} ({e})")))?;
            let port = url.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or_default();
            servers.keepers.push(tokio::spawn(keep(child, url.clone(), move || Ok(command(port)))));
            servers.urls.push(url);
        }
        Ok(servers)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for keeper in &self.keepers {
            // Dropping the keeper drops its child, which kills it.
            keeper.abort();
        }
    }
}
