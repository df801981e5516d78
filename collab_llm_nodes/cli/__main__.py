from collab_llm_nodes.cli import main

main()
