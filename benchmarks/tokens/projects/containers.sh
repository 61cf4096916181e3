# Containers and images of a small shop, of busybox.
cat > Dockerfile <<'D'
FROM shop/base
LABEL maintainer=ada
ENV SHOP=1
WORKDIR /shop
COPY . /shop
RUN for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do echo "unpacking part $n of 20"; done
RUN echo "warning: no lock file found" && cat Dockerfile > all
EXPOSE 8080
CMD ["sh"]
D
if ! docker image inspect shop/base > /dev/null 2>&1; then
    mkdir -p root/bin root/tmp root/etc
    cp /usr/bin/busybox root/bin/busybox
    for name in sh cat echo sleep ls date true false; do ln -s busybox root/bin/$name; done
    tar -C root -c . | docker import - shop/base > /dev/null
    rm -r root
    for n in 1 2 3 4 5 6 7 8; do docker tag shop/base registry.local:5000/shop/service-$n:1.$n.0; done
    docker run -d --name shop-web -p 8080:80 shop/base sh -c 'n=0; while [ $n -lt 300 ]; do echo "worker $((n % 4)) handled request in $((n % 17)) ms"; n=$((n+1)); done; echo "ERROR: connection to db:5432 refused" >&2; exec sleep 600' > /dev/null
    for n in 1 2 3 4 5 6; do docker run -d --name shop-worker-$n registry.local:5000/shop/service-$n:1.$n.0 sleep 600 > /dev/null; done
    docker run -d --name shop-migrate shop/base false > /dev/null
    sleep 1
fi
