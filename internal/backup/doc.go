// Package backup copies durable states of a store to an object store, and back.
//
//	base          a backup from which a state can be restored, together with its own base if it is incremental
//	full          has all pages of a state
//	incremental   has the pages that differ from the state of its base
//	part          an object with pages, named by the SHA-256 of its bytes
//	page table    id and checksum of every live page of a state, in parts
//	manifest      an object that describes a backup and names its parts; the SHA-256 of its bytes is in its name
//	chain         a full backup, and incremental ones that have each other as base, oldest first
//
//	engine ── pin ── live pages, runs of 1 MiB ── check ── frames (zstd) ── parts ── manifest
//	                                                                            │
//	directory ── superblocks ◄── digest of all pages ◄── pages ◄── frames ◄─────┘
//
// Layout, below the lineage of the store:
//
//	base/manifests/<id>.<sha256>       backups
//	base/parts/<sha256>                what they are made of; backups of one lineage share parts
//	base/deleted/<id>.<sha256>         manifests that prune has removed: their parts stay for an hour
//	base/jobs/<kind>-<id>-<number>     what runs now: backups, which use parts, and prunes, which delete them
//
// Invariants:
//   - a backup exists if and only if its manifest does. The manifest is created after all of its parts;
//   - every page was checked when it was copied, while the state was pinned: a full backup is also a verification;
//   - a page of an incremental backup's state is in it, or the page table of its base has it with the same checksum. Which pages need not be
//     read to know that is the pager's knowledge: see copier;
//   - the manifest has a digest over the checksums of all live pages, those of the base included. A restore compares it with
//     what is in the restored file, so that no wrong base and no missing page passes. A verification compares it with the page table, and that
//     with the pages and with the table of the base;
//   - no object is changed. A part that exists is not sent again, so that an interrupted backup continues. A damaged one is deleted and sent
//     again, where it is read: see readsParts;
//   - other objects are deleted only by Prune, and a part only while no backup runs and no restore does.
//
// The superblock's own pages are not copied. A restored file has the state's superblock and a second one after it, as an empty
// checkpoint leaves them, with the same store id and lineage. The caller gives it new ones.
package backup
