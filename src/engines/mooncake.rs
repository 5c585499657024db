//! vLLM's Mooncake connector: P and D get a turn at once and meet by a transfer's name at P's bootstrap server. It moves
//! KV from P to D only.

use serde_json::{Value, json};

use super::fetch::{Fetch, Unwell};

/// One transfer: what P and D are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Transfer {
    pub prefill: String,
    pub decode: String,
}

/// Where a P is met: its engine's id, which each of its lives has anew, and its bootstrap server's base URL.
pub(super) fn meeting(engine_id: &str, bootstrap: &str) -> String {
    format!("{engine_id}@{bootstrap}")
}

impl Transfer {
    /// A new one. `meets`: what [`meeting`] made. `None`: it is something else.
    pub fn new(meets: &str) -> Option<Self> {
        let (engine_id, bootstrap) = meets.rsplit_once('@')?;
        let id = format!("xfer-{:032x}", rand::random::<u128>());
        let prefill = json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id});
        let decode = json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
            "remote_engine_id": engine_id, "remote_bootstrap_addr": bootstrap});
        Some(Self { prefill: prefill.to_string(), decode: decode.to_string() })
    }
}

/// The engine's id from the bootstrap server at a base URL.
///
/// # Errors
/// It is not up, or serves several engines: which of them computes a prompt nobody could tell.
pub(super) async fn engine_id(fetch: &Fetch, bootstrap: &str) -> Result<String, Unwell> {
    let (status, said) = fetch.get(&format!("{bootstrap}/query")).await?;
    let unfit = |what: &str| Unwell::Unfit(format!("its Mooncake bootstrap server {bootstrap} {what}"));
    let engines: Value = serde_json::from_slice(&said).unwrap_or_default();
    let engines = engines.as_object().filter(|_| status.is_success());
    let engines = engines.ok_or_else(|| unfit(&format!("answered /query with {status}")))?;
    match engines.len() {
        0 => Err(unfit("knows no engine yet")),
        1 => {
            let id = engines.values().find_map(|engine| engine["engine_id"].as_str());
            id.map(str::to_owned).ok_or_else(|| unfit("names no engine_id"))
        }
        several => Err(unfit(&format!(
            "serves {several} data-parallel ranks: start one server for each, with a bootstrap server of its own"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engines::client::Connector;
    use crate::engines::fake;

    #[test]
    fn both_sides_of_a_transfer_name_it() {
        let transfer = Transfer::new(&meeting("e_dp0", "http://[::1]:8998")).unwrap();
        let said = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let (p, d) = (said(&transfer.prefill), said(&transfer.decode));
        assert_eq!(p["transfer_id"], d["transfer_id"]);
        assert_eq!((&d["remote_engine_id"], &p["do_remote_decode"]), (&json!("e_dp0"), &json!(true)));
        assert_eq!(d["remote_bootstrap_addr"], "http://[::1]:8998");
        assert_ne!(Transfer::new("e@http://p:1"), Transfer::new("e@http://p:1"));
        assert_eq!(Transfer::new("p:8998"), None);
    }

    #[actix_web::test]
    async fn a_bootstrap_server_of_one_engine_names_it() {
        let fetch = Fetch::new(&Connector::plain(Duration::from_secs(5)));
        let ask = async |status: u16, said: &'static str| {
            let addr = fake::engine(move |_, _| Some((status, said.to_owned()))).await;
            engine_id(&fetch, &format!("http://{addr}")).await.map_err(|unwell| unwell.to_string())
        };
        let one = r#"{"0":{"engine_id":"e_dp0","worker_addr":{"0":{"0":"tcp://p:1"}}}}"#;
        assert_eq!(ask(200, one).await, Ok("e_dp0".into()));
        let two = r#"{"0":{"engine_id":"a"},"1":{"engine_id":"b"}}"#;
        for (status, said, why) in [
            (200, two, "2 data-parallel ranks"),
            (200, "{}", "no engine yet"),
            (404, "{}", "/query with 404"),
        ] {
            assert!(ask(status, said).await.unwrap_err().contains(why), "{said}");
        }
    }
}
