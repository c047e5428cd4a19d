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

#[test]
fn every_linked_file_exists() {
    for document in
        ["README.md", "CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/OPERATION.md", "docs/ADDING-AN-EVENT.md"]
    {
        let folder = document.rsplit_once('/').map_or("", |(folder, _)| folder);
        for link in read(document).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if !link.contains("::") && !link.contains("://") && !link.starts_with('#') {
                read(&format!("{folder}/{link}"));
            }
        }
    }
}
