package storm

import (
	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// besideScans leaves as many scans of the shortest keys unread as the server admits, each with small pages, and sends the largest batches meanwhile.
func (a *attacker) besideScans() {
	const batch = 8000
	for i := range byte(30) {
		m := new(pb.BatchWriteRequest)
		for j := range batch {
			m.Mutations = append(m.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte{i, byte(j >> 8), byte(j)}})
		}
		a.call("a batch", "KVService/BatchWrite", m)
	}
	a.unread(a.times(100, 1940), a.times(25, 485), "KVService/Scan", &pb.ScanRequest{PageBytes: 16 << 10})
	a.sendAll(a.times(4, 40), encodedBatch(a.times(100_000, 200_000), 1))
	a.sendAll(a.times(4, 12), encodedBatch(4, 15<<20))
}
