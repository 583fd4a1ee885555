package server

import (
	"fmt"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
)

// BenchmarkAccess is the check of a small request: while users are not checked, and of a user with 100 ranges.
func BenchmarkAccess(b *testing.B) {
	var g gate
	g.bearer = bearerOfTests
	var grants []auth.Grant
	for i := range 100 {
		grants = append(grants, grant("rw", fmt.Sprintf("k%02d", i)), grant("l", fmt.Sprintf("k%02dx", i)))
	}
	table := makeTable(map[string][]auth.Grant{"alice": grants})
	for name, t := range map[string]*auth.Table{"off": nil, "100 ranges": table} {
		b.Run(name, func(b *testing.B) {
			g.publish(t)
			a := access{gate: &g, conn: new(connection), header: "Bearer alice"}
			row, request := rpcRows[pb.KVService_Get_FullMethodName], &pb.GetRequest{Key: []byte("k42something")}
			b.ReportAllocs()
			for b.Loop() {
				if err := a.check(row, request); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
