//! Generates the message and service types. protox parses the .proto files, so no `protoc` is needed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

const FILES: [&str; 5] = [
    "inference/grpc_service.proto",
    "inflight/v1/admin.proto",
    "inflight/v1/inference.proto",
    "inflight/v1/sampling.proto",
    "inflight/v1/worker.proto",
];

/// `size_of` a `String`, `Vec` or `BTreeMap`.
const CONTAINER: usize = 24;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=inflight");
    println!("cargo::rerun-if-changed=inference");
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("inflight.bin"), descriptors.encode_to_vec())?;
    fs::write(out.join("shapes.rs"), Shapes::of(&descriptors).source())?;
    let mut config = tonic_prost_build::Config::new();
    config.enable_type_names();
    tonic_prost_build::configure()
        .codec_path("crate::StrictCodec")
        .btree_map(".")
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}

/// Descriptors of all messages by full name, from which upper bounds on the sizes of the generated types are computed.
struct Shapes(BTreeMap<String, DescriptorProto>);

impl Shapes {
    fn of(descriptors: &FileDescriptorSet) -> Self {
        let mut shapes = Self(BTreeMap::new());
        for file in &descriptors.file {
            for message in &file.message_type {
                shapes.add(file.package(), message);
            }
        }
        shapes
    }

    fn add(&mut self, scope: &str, message: &DescriptorProto) {
        let name = format!("{scope}.{}", message.name());
        for nested in &message.nested_type {
            self.add(&name, nested);
        }
        self.0.insert(name, message.clone());
    }

    fn index(&self, field: &FieldDescriptorProto) -> usize {
        let name = field.type_name().trim_start_matches('.');
        self.0.keys().position(|known| known == name).unwrap_or_else(|| panic!("no message {name}"))
    }

    /// Upper bound on the inline size of one value of a field, without heap memory. Messages are inline, as `Option`s.
    fn inline(&self, field: &FieldDescriptorProto) -> usize {
        match field.r#type() {
            Type::String | Type::Bytes => CONTAINER,
            Type::Message | Type::Group => 8 + self.size(field.type_name().trim_start_matches('.')),
            Type::Double | Type::Int64 | Type::Uint64 | Type::Fixed64 | Type::Sfixed64 | Type::Sint64 => 8,
            Type::Bool => 1,
            _ => 4,
        }
    }

    /// Upper bound on `size_of` the generated type of a message. Recursive messages are not supported; the API has none.
    fn size(&self, name: &str) -> usize {
        let message = self.0.get(name).unwrap_or_else(|| panic!("no message {name}"));
        let mut alternatives = BTreeMap::new();
        let mut size = 0;
        for field in &message.field {
            let inline = self.inline(field);
            match field.oneof_index {
                _ if field.label() == Label::Repeated => size += CONTAINER,
                Some(of) if !field.proto3_optional() => {
                    let largest = alternatives.entry(of).or_insert(0);
                    *largest = inline.max(*largest);
                }
                Some(_) => size += 2 * inline.min(8) + inline.saturating_sub(8),
                None => size += inline,
            }
        }
        size += alternatives.values().map(|largest| 8 + largest).sum::<usize>();
        size.next_multiple_of(8)
    }

    /// Memory of an element of a repeated message field; of an entry of a map twice its size, as B-tree nodes may be half empty.
    fn element(&self, name: &str) -> usize {
        let is_entry =
            self.0.get(name).and_then(|message| message.options.as_ref()).is_some_and(|of| of.map_entry());
        self.size(name) * if is_entry { 2 } else { 1 }
    }

    /// Rust source of the table of `decoded_size`: name, size, and fields with heap memory of each message.
    fn source(&self) -> String {
        let mut source = String::from("&[\n");
        for (name, message) in &self.0 {
            let mut fields = String::new();
            for field in &message.field {
                let repeated = field.label() == Label::Repeated;
                let kind = match field.r#type() {
                    Type::String | Type::Bytes => {
                        format!("Kind::Bytes({})", if repeated { CONTAINER } else { 0 })
                    }
                    Type::Message | Type::Group => {
                        let element = self.element(field.type_name().trim_start_matches('.'));
                        format!(
                            "Kind::Message({}, {})",
                            self.index(field),
                            if repeated { element } else { 0 }
                        )
                    }
                    _ if !repeated => continue,
                    Type::Double | Type::Fixed64 | Type::Sfixed64 => "Kind::Fixed(8, 8)".to_owned(),
                    Type::Float | Type::Fixed32 | Type::Sfixed32 => "Kind::Fixed(4, 4)".to_owned(),
                    _ => format!("Kind::Varint({})", self.inline(field)),
                };
                let _ = write!(fields, "({}, {kind}), ", field.number());
            }
            let _ = writeln!(
                source,
                "    Shape {{ name: {name:?}, #[cfg(test)] size: {}, fields: &[{fields}] }},",
                self.size(name)
            );
        }
        source + "]\n"
    }
}
