// Package memtable sets the memtable beside others': Badger's skiplist for speed, Pebble for what iteration yields.
package memtable
