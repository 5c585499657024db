use std::io::Write;

use super::*;

fn with_file(text: &str) -> Result<Loaded, SettingsError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    load(&Layers { file: Some(file.path().to_owned()), ..Layers::default() })
}

fn problem(text: &str) -> String {
    let message = with_file(text).unwrap_err().to_string();
    message.split_once(": ").map(|(_, rest)| rest.to_owned()).unwrap()
}

#[test]
fn the_files_are_the_presets() {
    let default = load(&Layers::default()).unwrap().settings;
    assert_eq!((default.preset, default.options), (Preset::Production, Options::production()));
    let paper = with_file("[algorithm]\npreset = \"paper\"").unwrap().settings;
    assert_eq!((paper.preset, &paper.options), (Preset::Paper, &Options::paper()));
    assert_eq!(with_file(PAPER).unwrap().settings, paper);
}

#[test]
fn both_files_spell_every_option_out() {
    let mut keys: Vec<String> = Value::try_from(Options { epsilon: Some(1), ..Options::paper() })
        .unwrap()
        .as_table()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    keys.push("preset".into());
    keys.sort();
    for text in [DEFAULT, PAPER] {
        let table: Table = text.parse().unwrap();
        let mut spelled: Vec<String> = table["algorithm"].as_table().unwrap().keys().cloned().collect();
        spelled.sort();
        assert_eq!(spelled, keys);
    }
}

#[test]
fn later_layers_win() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    write!(file, "[http]\nlisten = \"a:1\"\nworkers = 3\nbody_limit_mib = 7").unwrap();
    let layers = Layers {
        file: Some(file.path().to_owned()),
        env: HashMap::from([
            ("KVC__HTTP__LISTEN".into(), "b:2".into()),
            ("KVC__HTTP__WORKERS".into(), "5".into()),
            ("KVC__FLEET__DECODE".into(), "http://x:1, http://y:2/".into()),
            ("KVC__NODE__MODEL".into(), "7".into()),
            ("KVC_OTHER".into(), "x".into()),
        ]),
        flags: vec![("http.listen".into(), "c:3".into()), ("algorithm.rho".into(), "1".into())],
        enable_d2p: false,
    };
    let s = load(&layers).unwrap().settings;
    assert_eq!((s.http.listen.as_str(), s.http.workers, s.http.body_limit_mib), ("c:3", 5, 7));
    assert_eq!(s.fleet.decode, ["http://x:1", "http://y:2"]);
    assert_eq!((s.node.model.as_str(), s.options.rho), ("7", 1.0));
}

#[test]
fn an_option_overrides_its_preset() {
    let s = with_file("[algorithm]\npreset=\"paper\"\nepsilon=2\nd2p_staleness_budget_tokens=\"inf\"");
    let expected = Options { epsilon: Some(2), d2p_staleness_budget_tokens: None, ..Options::paper() };
    let host = |text: &str| with_file(text).unwrap().settings.node.d2p_host_tokens;
    assert_eq!((host(""), host("[node]\nd2p_host_tokens = 0")), (None, Some(0)));
    assert_eq!(s.unwrap().settings.options, expected);
}

#[test]
fn sync_is_enabled_as_the_preset_means_it() {
    let trigger = |flags: &[(&str, &str)]| {
        let flags = flags.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let layers = Layers { flags, enable_d2p: true, ..Layers::default() };
        load(&layers).unwrap().settings.options.d2p_trigger
    };
    assert_eq!(trigger(&[]), D2pTrigger::Evict);
    assert_eq!(trigger(&[("algorithm.preset", "paper")]), D2pTrigger::Commit);
    assert_eq!(trigger(&[("algorithm.d2p_trigger", "both")]), D2pTrigger::Both);
    assert_eq!(trigger(&[("algorithm.enable_d2p_sync", "false")]), D2pTrigger::Off);
    let key = |text: &str| with_file(text).map(|loaded| loaded.settings.options.d2p_trigger);
    assert_eq!(key("[algorithm]\npreset = \"paper\"\nenable_d2p_sync = true").unwrap(), D2pTrigger::Commit);
    assert_eq!(key("[algorithm]\nenable_d2p_sync = false").unwrap(), D2pTrigger::Off);
    let wrong = problem("[algorithm]\nenable_d2p_sync = 1");
    assert_eq!(wrong, "`algorithm.enable_d2p_sync = 1` is not allowed: true or false");
}

#[test]
fn effective_settings_read_back_the_same() {
    let text = "[algorithm]\npreset = \"paper\"\nalpha = 4\nd2p_staleness_budget_tokens = \"inf\"\n\
                [fleet]\ndecode = [\"http://[::1]:80\"]";
    let loaded = with_file(text).unwrap();
    assert_eq!(with_file(&loaded.to_toml()).unwrap().settings, loaded.settings);
}

#[test]
fn errors_name_key_value_and_what_is_allowed() {
    let cases = [
        ("[htpp]\nlisten='a:1'", "unknown key `htpp`; did you mean `http`?"),
        ("listen='a:1'", "unknown key `listen`; did you mean `http.listen`?"),
        (
            "[algorithm]\ntau_apend=1",
            "unknown key `algorithm.tau_apend`; did you mean `algorithm.tau_append`?",
        ),
        ("[http]\nqqq=1", "unknown key `http.qqq`"),
        ("http=1", "`http = 1` is not allowed: a section: [http]"),
        ("[algorithm]\nrho=1.5", "`algorithm.rho = 1.5` is not allowed: a number in (0, 1]"),
        ("[algorithm]\nrho=nan", "`algorithm.rho = NaN` is not allowed: a number in (0, 1]"),
        ("[algorithm]\npreset='x'", "`algorithm.preset = \"x\"` is not allowed: `paper` or `production`"),
        (
            "[algorithm]\noverlap='x'",
            "`algorithm.overlap = \"x\"` is not allowed: unknown variant `x`, expected `set` or `prefix`",
        ),
        (
            "[algorithm]\nepsilon='x'",
            "`algorithm.epsilon = \"x\"` is not allowed: invalid type: string \"x\", expected u32, or \"all\"",
        ),
        (
            "[http]\nworkers=-1",
            "`http.workers = -1` is not allowed: invalid value: integer `-1`, expected usize",
        ),
        (
            "[http]\nlisten='8080'",
            "`http.listen = \"8080\"` is not allowed: host:port, e.g. \"127.0.0.1:8080\"",
        ),
        ("[http]\nbody_limit_mib=0", "`http.body_limit_mib = 0` is not allowed: an integer from 1 to 1024"),
        (
            "[fleet]\ndecode=['10.0.0.1:80']",
            "`fleet.decode = \"10.0.0.1:80\"` is not allowed: base URLs such as \"http://10.0.0.5:8101\"",
        ),
        (
            "[fleet]\ndecode=['http://a:1','http://a:1/']",
            "`fleet.decode = \"http://a:1\"` is not allowed: each worker once",
        ),
        (
            "[fleet]\napis=['messages']",
            "`fleet.apis = a list without \"chat\"` is not allowed: \"chat\" is what the other APIs are translated to; \
             every engine must speak it",
        ),
        (
            "[sessions]\ntokens='tokens'",
            "`sessions.tokens = \"tokens\"` is not allowed: \"bytes\": a token of the builtin worker is four bytes",
        ),
        (
            "[fleet]\nsglang_plugin=true",
            "`fleet.sglang_plugin = true` is not allowed: false without `fleet.engine = \"sglang\"`",
        ),
        (
            "[fleet]\nkv_replay=['http://a:1=tcp://a:2']",
            "`fleet.kv_replay = \"http://a:1=tcp://a:2\"` is not allowed: entries such as \
             \"http://10.0.0.5:8000=tcp://10.0.0.5:5558\", of engines that are in `fleet.kv_events`",
        ),
        (
            "[fleet]\nmooncake=['http://a:1=http://a:2']",
            "`fleet.mooncake = [\"http://a:1=http://a:2\"]` is not allowed: [] without `fleet.engine = \"vllm\"`",
        ),
        (
            "[fleet]\nengine='vllm'\nmooncake=['http://a:1=a:2']",
            "`fleet.mooncake = \"http://a:1=a:2\"` is not allowed: entries such as \
             \"http://10.0.0.5:8000=http://10.0.0.5:8998\"",
        ),
        (
            "[fleet]\nengine='vllm'\nprefill=['http://a:1','http://b:1']\nmooncake=['http://a:1=http://a:2']",
            "`fleet.mooncake = [\"http://a:1=http://a:2\"]` is not allowed: an entry for each prefill worker; \
             \"http://b:1\" has none",
        ),
        ("[node]\ntime_scale=0.0", "`node.time_scale = 0` is not allowed: a number > 0"),
    ];
    for (text, expected) in cases {
        assert_eq!(problem(text), expected, "{text}");
    }
}

#[test]
fn errors_name_where_a_value_came_from() {
    let env = HashMap::from([("KVC__HTTP__WORKERS".into(), "many".into())]);
    let error = load(&Layers { env, ..Layers::default() }).unwrap_err().to_string();
    assert!(error.starts_with("environment: `http.workers = \"many\"` is not allowed"), "{error}");
    let flags = vec![("algorithm.tau_reject".into(), "0".into())];
    let error = load(&Layers { flags, ..Layers::default() }).unwrap_err().to_string();
    assert_eq!(error, "command line: `algorithm.tau_reject = 0` is not allowed: an integer >= 1");
    let missing = Layers { file: Some("no/such.toml".into()), ..Layers::default() };
    assert!(load(&missing).unwrap_err().to_string().starts_with("no/such.toml: "));
    assert!(with_file("[http\n").unwrap_err().to_string().contains("TOML parse error"));
}

#[test]
fn a_list_is_written_as_in_the_file_or_with_commas() {
    for text in ["http://a:1, http://b:1", "['http://a:1', \"http://b:1\"]"] {
        let flags = vec![("fleet.decode".into(), text.into())];
        let loaded = load(&Layers { flags, ..Layers::default() }).unwrap();
        assert_eq!(loaded.settings.fleet.decode, ["http://a:1", "http://b:1"], "{text}");
    }
}

#[test]
fn serving_needs_a_decode_worker() {
    let none = load(&Layers::default()).unwrap().settings.require_workers().unwrap_err().to_string();
    assert!(none.starts_with("no workers configured: `fleet.decode = []`"), "{none}");
    let flags = vec![("fleet.decode".into(), "http://a:1".into())];
    let some = load(&Layers { flags, ..Layers::default() }).unwrap();
    assert_eq!(some.settings.require_workers(), Ok(()));
}
