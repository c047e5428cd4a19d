//! What the documents say is what the sources say.

use std::fs;

fn read(path: &str) -> String {
    let root = env!("CARGO_MANIFEST_DIR");
    fs::read_to_string(format!("{root}/{path}")).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The code quoted in a document: blocks that begin with the path of a source file.
fn quotations(document: &str) -> Vec<(String, String)> {
    let blocks = document.split("```rs\n// ").skip(1);
    let blocks = blocks.filter_map(|block| block.split_once("\n```")?.0.split_once('\n'));
    blocks.map(|(path, code)| (path.to_owned(), code.to_owned())).collect()
}

#[test]
fn the_guide_quotes_the_sources() {
    let quotations = quotations(&read("docs/ADDING-AN-EVENT.md"));
    assert!(quotations.len() >= 4, "the guide has lost its quotations: {quotations:?}");
    for (path, code) in quotations {
        assert!(read(&path).contains(&code), "{path} does not contain:\n{code}");
    }
}

#[test]
fn the_readme_names_every_setting_and_its_default() {
    let readme = read("README.md");
    let defaults = read("config/default.toml").parse::<toml::Table>().expect("valid TOML");
    for (section, keys) in &defaults {
        for (key, value) in keys.as_table().expect("a section") {
            assert!(readme.contains(&format!("`{section}.{key}`")), "{section}.{key} is not in the README");
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            assert!(
                readme.contains(&format!("`{value}`")),
                "{section}.{key}: its default {value} is not in the README"
            );
        }
    }
}

/// The files that a module's path may mean: one of the tests here, or one of the sources.
fn files_of(module: &str) -> String {
    let path = module.replace("::", "/");
    let root = env!("CARGO_MANIFEST_DIR");
    let files =
        [format!("{root}/tests/it/{path}.rs"), format!("{root}/src/{path}.rs"), format!("{root}/src/{path}/mod.rs")];
    files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect()
}

#[test]
fn every_field_case_names_tests_that_exist() {
    let document = read("docs/FIELD-CASES.md");
    let mut ids = Vec::new();
    for row in document.lines().filter(|line| line.starts_with("| C-")) {
        let [_, id, fault, shown_by, _] = row.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("not three cells: {row}")
        };
        ids.push(id.trim_start_matches("C-").parse::<u32>().expect(row));
        assert!(!fault.is_empty(), "{row}");
        let (mut tests, mut targets) = (0, 0);
        for quoted in shown_by.split('`').skip(1).step_by(2) {
            if let Some(target) = quoted.strip_prefix("make ") {
                assert!(read("Makefile").contains(&format!("\n{target}:")), "{id}: {quoted}");
                targets += 1;
            } else {
                let (module, test) = quoted.rsplit_once("::").expect(row);
                let is_a_test = format!("fn {test}() {{");
                assert!(files_of(module).contains(&is_a_test), "{id}: there is no {quoted}");
                tests += 1;
            }
        }
        assert!(tests + targets > 0 || shown_by.contains("*missing*"), "{id} is neither shown nor missing");
        assert!(tests <= 3, "{id}: the best tests are enough");
    }
    let expected: Vec<_> = (1..=59).chain(89..=126).chain(135..=148).collect();
    assert_eq!(ids, expected, "each case once, in its order");
}

#[test]
fn every_linked_file_exists() {
    for document in [
        "README.md",
        "CONTRIBUTING.md",
        "docs/ARCHITECTURE.md",
        "docs/OPERATION.md",
        "docs/COPIES.md",
        "docs/ADDING-AN-EVENT.md",
        "docs/FIELD-CASES.md",
        "docs/contract/README.md",
        "examples/producers/README.md",
    ] {
        let folder = document.rsplit_once('/').map_or("", |(folder, _)| folder);
        for link in read(document).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if !link.contains("::") && !link.contains("://") && !link.starts_with('#') {
                let linked = format!("{}/{folder}/{link}", env!("CARGO_MANIFEST_DIR"));
                assert!(fs::exists(&linked).expect("a readable folder"), "{document} links {link}");
            }
        }
    }
}
